"""The batch logs of a job as files: one ``batches/ep<E>-step<S>`` per step, and compressed in ``archive/`` where a job
keeps all of them (``services.files.batch_archive``).

The rule kept here: a file under its final name is complete, flushed to disk and never written again. Together with the
checkpoints it is the truth of a run. ``gspo_core.log.batches`` defines the bytes; the fork records of epochs decide
which of them are void. ``services.files.batch_view`` shows the files.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import BinaryIO

from gspo_core.log import batches
from gspo_core.log.batches import BatchExtra, DamagedBatch, LoggedBatch, UnknownBatchSchema, decode_batch, encode_batch
from gspo_core.position import Position
from gspo_core.types import Group
from services.files.durable import make_directory, remove_unfinished, write_once
from services.files.job_dir import JobDir, parse_step_name, positions_in, step_name

__all__ = [
    "BatchLog",
    "BatchLogExists",
    "BatchLogNotFound",
    "DamagedBatchLog",
    "LoggedBatch",
    "UnknownLogSchema",
    "batch_files",
    "read_batch",
    "removable_batches",
]


class BatchLogExists(Exception):
    """The batch of this epoch and step already exists. A second writer must stop: its epoch is void."""


class BatchLogNotFound(Exception):
    """There is no batch of this epoch and step."""


class DamagedBatchLog(Exception):
    """A batch log differs from what was written; the message says where the damage shows."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class UnknownLogSchema(DamagedBatchLog):
    """Another release wrote the batch log, or segments in it, and this release cannot read it."""


class BatchLog:
    """The batch logs of one job."""

    def __init__(self, job: JobDir) -> None:
        self._job = job

    def path(self, epoch: int, step: int) -> Path:
        """Where the log lies, or would."""
        at = Position(epoch, step)
        path, archived = self._job.batch(at), self._job.archived(at)
        return archived if not path.exists() and archived.exists() else path

    def write(self, epoch: int, step: int, groups: Sequence[Group], extra: BatchExtra) -> Path:
        """Write the batch of ``step``; when this returns, it survives a crash of the machine."""
        path = self._job.batch(Position(epoch, step))
        make_directory(path.parent)
        try:
            write_once(path, encode_batch(Position(epoch, step), groups, extra), epoch=epoch)
        except FileExistsError as error:
            raise BatchLogExists(f"{path} already exists; a batch log is written only once") from error
        return path

    def read(self, epoch: int, step: int) -> LoggedBatch:
        """The batch of ``step``, checked."""
        try:
            return read_batch(self.path(epoch, step))
        except FileNotFoundError:  # it may have been archived just now
            path = self.path(epoch, step)
            if not path.is_file():
                raise BatchLogNotFound(f"there is no {path}") from None
            return read_batch(path)

    def size(self, epoch: int, step: int) -> int:
        """In bytes, as it was written; 0 where it is gone."""
        from gspo_core.log.archive import HEADER_BYTES, plain_size  # loaded once a log is looked at

        path = self.path(epoch, step)
        try:
            with path.open("rb") as file:
                return plain_size(file.read(HEADER_BYTES)) or path.stat().st_size
        except (FileNotFoundError, DamagedBatch):
            return 0

    def groups_of(self, epoch: int, step: int) -> tuple[int, ...]:
        """The numbers of a batch's groups, to find one: of a log that is not archived it reads only the index, and
        checks nothing."""
        path = self.path(epoch, step)
        try:
            with path.open("rb") as file:
                return _group_numbers(file)
        except FileNotFoundError:
            raise BatchLogNotFound(f"there is no {path}") from None
        except DamagedBatch as error:
            raise DamagedBatchLog(path, str(error)) from error

    def steps(self) -> list[Position]:
        """The position of every file, in order."""
        return sorted({*positions_in(self._job.batches), *positions_in(self._job.archive)})

    def written(self) -> list[Position]:
        """The positions of the logs outside the archive."""
        return positions_in(self._job.batches)

    def remove_unfinished(self, epoch: int) -> None:
        """Remove half-written files of trainers before ``epoch``: they have lost the job."""
        for directory in (self._job.batches, self._job.archive):
            remove_unfinished(directory, epoch)

    def remove(self, positions: Collection[tuple[int, int]]) -> None:
        """Remove exactly these files, not what is archived; one that is written at the same time stays."""
        for epoch, step in positions:
            self._job.batch(Position(epoch, step)).unlink(missing_ok=True)  # another trainer may be faster


def _group_numbers(file: BinaryIO) -> tuple[int, ...]:
    from gspo_core.log.archive import plain, plain_size

    header = file.read(batches.HEADER_BYTES)
    if plain_size(header):
        return _group_numbers(io.BytesIO(plain(header + file.read())))
    return batches.group_numbers(file.read(batches.index_length(header)))


def batch_files(directory: Path) -> list[Path]:
    """The batch logs in ``directory``, or in the batches of a job with that directory, in order."""
    job = JobDir(directory)
    if not job.batches.is_dir():
        return [directory / step_name(at) for at in positions_in(directory)]
    log = BatchLog(job)
    return [log.path(epoch, step) for epoch, step in log.steps()]


def removable_batches(found: Collection[tuple[int, int]], after_step: int, num_newest: int) -> set[tuple[int, int]]:
    """The batches of ``found`` that no replay from ``after_step`` needs, except the newest ones."""
    older = sorted(found)[: max(0, len(found) - num_newest)]
    return {position for position in older if position[1] <= after_step}


def read_batch(path: Path) -> LoggedBatch:
    """The content of the file at ``path``; raises ``DamagedBatchLog`` unless it is exactly what was written."""
    from gspo_core.log.archive import plain

    try:
        batch = decode_batch(plain(path.read_bytes()))
    except UnknownBatchSchema as error:
        raise UnknownLogSchema(path, str(error)) from error
    except DamagedBatch as error:
        raise DamagedBatchLog(path, str(error)) from error
    named = parse_step_name(path.name)
    if named is not None and named != batch.position:
        raise DamagedBatchLog(path, f"holds epoch {batch.epoch} step {batch.step}: the file was renamed")
    return batch
