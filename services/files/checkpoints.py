"""Checkpoints of a job: learner state and lineage in one directory, ``checkpoints/ep<E>-step<S>``, written once.

The rule it keeps: a directory under its final name is complete and on disk, and reading verifies it:
``checkpoint.json`` carries its own sha256 and that of the learner's manifest, which carries those of the tensors. A
damaged checkpoint is passed over and reported; one of another release is refused by name, because passing over it would
start the job over. Each epoch leaves a write-once record of where it forked off, so that the age of a dead epoch's
version stays known. ``checkpoint_storage`` decides where the bytes lie, ``gspo_core.log`` what they mean.

    checkpoint.json   learner/learner.json   learner/rank-00000.safetensors      (format 1 had lineage.json alone)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gspo_core.log import checkpoints as log
from gspo_core.log.checkpoints import DAMAGE, UnknownCheckpointFormat
from gspo_core.log.history import LostForkRecord, forks_among, lineage_of
from gspo_core.log.layout import (
    CHECKPOINT_MANIFEST,
    LEARNER,
    LEARNER_MANIFEST,
    fork_records,
)
from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from gspo_core.staleness import UnknownVersion, in_history
from services.files.checkpoint_storage import CheckpointStorage, Stored, StoredFile, storage_of
from services.files.durable import write_flushed
from services.files.job_dir import JobDir, parse_step_name, step_name
from services.process.telemetry import get_logger

__all__ = ["LOST", "CheckpointStore", "LostForkRecord", "StoredCheckpoint", "UnknownCheckpointFormat"]

# Errors of a file that is missing or that the disk has lost. Any other error may be gone the next time.
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


@dataclass(frozen=True)
class StoredCheckpoint:
    position: Position
    lineage: Lineage
    storage: CheckpointStorage

    @property
    def name(self) -> str:
        return step_name(self.position)

    @property
    def learner_dir(self) -> Path:
        """The learner's state, on this machine."""
        return self.storage.fetch(self.name) / LEARNER


def _log_skipped(name: str, problem: str) -> None:
    get_logger().warning("checkpoint skipped", name=name, error=problem)


class CheckpointStore:
    """The checkpoints of one job. ``storage``: in place of the one that ``storage_of`` gives."""

    def __init__(self, job: JobDir, storage: CheckpointStorage | None = None) -> None:
        self._storage = storage or storage_of(job)
        self._checked: dict[Position, frozenset[StoredFile]] = {}
        """Checkpoints found intact, with the state of their files at that time."""

    def write(self, position: Position, lineage: Lineage, save: Callable[[Path], None]) -> None:
        def fill(directory: Path) -> None:
            save(directory / LEARNER)
            learner = directory / LEARNER_MANIFEST
            digest = _sha256(learner.read_bytes()) if learner.is_file() else None
            write_flushed(directory / CHECKPOINT_MANIFEST, log.encode_checkpoint(position, lineage, digest))

        self._storage.put(step_name(position), position.epoch, fill)

    def positions(self) -> list[Position]:
        """Positions of all checkpoints, intact or not, in order."""
        found = (parse_step_name(name) for name in self._storage.names())
        return sorted(position for position in found if position is not None)

    def has(self, position: Position) -> bool:
        """Intact or not."""
        return position in self.positions()

    def of_the_history(self, kept: Collection[Position]) -> Collection[Position]:
        """Those that the job did not leave when it went back; all, where the records of that are lost."""
        try:
            forks = self.forks()
            newest = max(forks, default=max((at.epoch for at in kept), default=1))
            return frozenset(at for at in kept if in_history(at, newest, forks))
        except (LostForkRecord, UnknownCheckpointFormat, UnknownVersion):
            return kept

    def describe(self, position: Position) -> Stored:
        """Raises FileNotFoundError."""
        return self._storage.describe(step_name(position))

    def learner_dir(self, position: Position) -> Path:
        """The learner's state of a checkpoint, on this machine, intact or not."""
        return self._storage.fetch(step_name(position)) / LEARNER

    def remove(self, position: Position) -> None:
        self._storage.remove(step_name(position))

    def newest_first(self, skipped: Callable[[str, str], None] = _log_skipped) -> list[StoredCheckpoint]:
        """Complete checkpoints; damage to the tensors of one shows only when they are loaded.

        ``skipped`` receives the name and the damage of each damaged one. Raises UnknownCheckpointFormat;
        and OSError where one cannot be read right now, which is no damage.
        """
        found = []
        for position in reversed(self.positions()):
            try:
                found.append(StoredCheckpoint(position, self._read(position), self._storage))
            except OSError as error:
                if error.errno not in LOST:
                    raise
                skipped(step_name(position), f"{type(error).__name__}: {error}")
            except DAMAGE as error:
                skipped(step_name(position), f"{type(error).__name__}: {error}")
        return found

    def collect(
        self,
        keep: int,
        check: Callable[[Path], None] = lambda _: None,
        is_spared: Callable[[Position], bool] = lambda _: False,
    ) -> int:
        """Remove checkpoints older than the newest ``keep`` intact ones of the run so far, but for those of the run
        that are spared. Returns a step: batch logs after it are needed, whichever of these is lost. With fewer than
        ``keep`` it is 0: only the logs could replace the others.

        Checkpoints of a dead epoch do not count, however late it wrote them: a zombie may call this too, and must not
        crowd out those that its successor resumes from. ``check`` raises ValueError for a damaged learner's state; it
        is asked once, unless the files have changed.
        """
        forks, found = self.forks(), self.positions()
        living = [position for position in found if in_history(position, max(forks, default=0), forks)]
        intact = list(islice((one for one in reversed(living) if self._is_intact(one, check)), keep))
        if not intact:
            return 0
        first = living.index(intact[-1]) if len(intact) == keep else 0
        for position in set(found) - {*living[first:], *filter(is_spared, living)}:
            self._storage.remove(step_name(position), position.epoch)
        return intact[-1].step if len(intact) == keep else 0

    def is_intact(self, position: Position, check: Callable[[Path], None]) -> bool:
        """``check`` as for ``collect``. Raises UnknownCheckpointFormat; and OSError where it cannot be read right
        now, which is no damage."""
        try:
            self._read(position)
            files = frozenset(self.describe(position).files)
            if self._checked.get(position) != files:
                check(self.learner_dir(position))
                self._checked[position] = files
        except OSError as error:
            if error.errno not in LOST:
                raise
            return False
        except DAMAGE:
            return False
        return True

    def _is_intact(self, position: Position, check: Callable[[Path], None]) -> bool:
        """What cannot be read is none."""
        try:
            return self.is_intact(position, check)
        except (OSError, UnknownCheckpointFormat):
            return False

    def _read(self, position: Position) -> Lineage:
        """The lineage in a checkpoint. Raises UnknownCheckpointFormat, OSError, one of DAMAGE."""
        return lineage_of(position, self._storage.read)

    def begin_epoch(self, epoch: int, parent: Position) -> None:
        """Record where ``epoch`` forks off; raises FileExistsError when another trainer has begun this epoch.

        Removes half-written and half-removed files of earlier epochs: their trainers lost the job with their lease.
        """
        data = log.encode_fork(parent)
        first, copy = fork_records(epoch)
        self._storage.write_once(first, data, epoch)
        try:
            self._storage.write_once(copy, data, epoch)
        except OSError:  # the next attempt must find the name free
            self._storage.remove(first)
            raise
        self._storage.remove_unfinished(epoch)

    def go_back(self, epoch: int, to: Position) -> None:
        """Abandon what lies beyond ``to``: an epoch without a trainer forks off there, and nothing is removed.

        It may be repeated, and by any process: no trainer has the epoch.
        """
        data = log.encode_fork(to)
        for name in fork_records(epoch):
            with contextlib.suppress(FileExistsError):
                self._storage.write_once(name, data, epoch)

    def forks(self) -> dict[int, Position]:
        """Where each epoch but the first forked off. Raises LostForkRecord, UnknownCheckpointFormat."""

        def damaged(name: str, problem: str) -> None:
            get_logger().warning("the record of an epoch is damaged", name=name, error=problem)

        return forks_among(self._storage.names(), self._storage.read, damaged)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
