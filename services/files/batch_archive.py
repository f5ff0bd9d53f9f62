"""The archive of a job: batch logs that are kept no longer, compressed, as far as a bound allows.

The rule: a log leaves ``batches/`` only after the archive holds its bytes durably. The archive has no gaps: it begins
with the first step, so everything in it can be trained again from the base model; once a log does not fit, none
follows.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from gspo_core.log.archive import pack, plain
from gspo_core.log.batches import DamagedBatch
from gspo_core.position import Position
from gspo_core.staleness import in_history
from services.files.durable import make_directory, write_once
from services.files.job_dir import JobDir, positions_in
from services.process.telemetry import get_logger


@dataclass(frozen=True)
class LogHistory:
    """What of the logs holds, as their trainer knows it."""

    epoch: int
    forks: Mapping[int, Position]
    begun_after: int = 0
    """The step of its parent that a forked job began after."""

    def has(self, at: Position) -> bool:
        return in_history(at, self.epoch, self.forks)


def archived(
    job: JobDir, spent: Collection[tuple[int, int]], history: LogHistory, most_bytes: int
) -> set[tuple[int, int]]:
    """Archive the logs of the history among ``spent``. Returns those that may be removed now: void ones, archived ones
    and those beyond the bound. Where the disk refuses, the rest stays as it is."""
    left = {at for at in (Position(*one) for one in spent) if history.has(at)}
    done: set[tuple[int, int]] = set(spent) - left
    try:
        for at in _archive(job, left, history, most_bytes):
            done.add(at)
    except OSError as error:
        get_logger().warning("batch logs could not be archived", error=str(error), left=len(set(spent) - done))
    return done


def _archive(job: JobDir, positions: Collection[Position], history: LogHistory, most_bytes: int) -> Iterator[Position]:
    held = positions_in(job.archive)
    steps = {at.step for at in held if history.has(at)}
    room = most_bytes - sum(job.archived(at).stat().st_size for at in held)
    for at in sorted(positions, key=lambda one: one.step):
        if at.step == history.begun_after + 1 or at.step - 1 in steps:
            size = _put(job, at, room)
            if size is not None:
                steps.add(at.step)
                room -= size
        yield at


def _put(job: JobDir, at: Position, room: int) -> int | None:
    """The bytes that a log has come to take in the archive; None: it does not fit."""
    taken = 0
    # Again if an episode was erased meanwhile: erasing looks into the archive after this place.
    while not _holds(job, at, log := job.batch(at).read_bytes()):
        packed = pack(log)
        if len(packed) > room:
            return None
        make_directory(job.archive)
        write_once(job.archived(at), (packed,))
        shutil.copystat(job.batch(at), job.archived(at))  # it is as old as before
        taken = len(packed)
    return taken


def _holds(job: JobDir, at: Position, log: bytes) -> bool:
    """Whether the archive has these bytes. Others are damaged, or hold an episode erased since; they are removed."""
    path = job.archived(at)
    try:
        if plain(path.read_bytes()) == log:
            return True
    except FileNotFoundError:
        return False
    except DamagedBatch:
        pass
    path.unlink(missing_ok=True)
    return False
