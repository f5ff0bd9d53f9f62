"""Replays logged steps that no checkpoint contains, from the batch logs alone, without Redis or engines.

Rule: replay a step with exactly its logged data, token ages and settings, so that it yields the same weights and
published results stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gspo_core.log.batches import ErasedStep
from gspo_core.log.history import batches_after
from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning
from gspo_core.log.steps import train_again
from gspo_core.position import Position
from services.files.batch_log import BatchLog, DamagedBatchLog, UnknownLogSchema
from services.process.telemetry import get_logger
from services.trainer.ranks.learner import AnyLearner


def replay(
    learner: AnyLearner,
    lineage: Lineage,
    start: Position,
    log: BatchLog,
    forks: Mapping[int, Position],
    tuning: Tuning,
    trained: Callable[[Position, Mapping[str, float]], None] = lambda *_: None,
) -> tuple[Position, str | None]:
    """Train the logged steps after checkpoint ``start``; return the last position and any problem that cut it short.

    ``forks`` maps each started epoch to its fork position. A log that is damaged, or has erased episodes, ends the
    replay: the groups of that step and later ones are owed again. Calls ``trained`` after every step, with what it
    reports. Raises UnknownLogSchema.
    """
    for position in batches_after(start, log.steps(), max(forks, default=start.epoch), forks):
        try:
            batch = log.read(position.epoch, position.step)
        except UnknownLogSchema:
            raise
        except DamagedBatchLog as error:
            return start, str(error)
        try:
            metrics = train_again(learner, lineage, batch, tuning)
        except ErasedStep as error:
            return start, str(error)
        get_logger().info("step replayed", epoch=position.epoch, step=position.step)
        trained(position, metrics)
        start = position
    return start, None
