"""Which batch logs a trainer that takes a job over trains again: nothing is sampled twice, nothing trained twice.

The rule: a log counts only if it lies on the one history that the newest epoch continued. What a trainer wrote after
its epoch was over (it did not know yet) is a dead end, however high its step. Nothing is read or trained here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gspo_core.staleness import Position, shared_step


def logs_after(checkpoint: Position, logs: Iterable[Position], forks: Mapping[int, Position]) -> list[Position]:
    """The logs between ``checkpoint`` and the end of the history, in order, without a hole.

    ``forks`` says of every epoch that was begun where it forked off. Call it before the new epoch is begun, and record
    the last of these as what the new epoch forks off (the checkpoint itself, if there are none).
    """
    known = sorted(logs, key=lambda log: (log.epoch, log.step))
    newest = max([checkpoint.epoch, *forks])
    start = forks[newest].step if newest in forks else checkpoint.step
    tip = Position(newest, max([start, *(log.step for log in known if log.epoch == newest)]))
    on_the_way = {log.step: log for log in known if shared_step(log, tip, forks) == log.step}
    found: list[Position] = []
    step = checkpoint.step + 1
    while step in on_the_way:
        found.append(on_the_way[step])
        step += 1
    return found
