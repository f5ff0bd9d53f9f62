"""Records that outlive Redis: the accepted job, its states, environments and versions, as files of the job's directory.

The rule: a file is written once and flushed before its content is acknowledged; states are numbered, and the highest
number holds. So the newest state wins, in whatever order writers come and however late one wakes up. It does not know
what a server has forgotten (``rebuild`` does) and holds no weights, batches or checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_core.log.records import (
    SCHEMA,
    AcceptedJob,
    DamagedRecord,
    RecordConflict,
    VersionRecord,
    decode_metrics,
    decode_record,
    encode_record,
)
from gspo_core.position import Position
from services.files.disk_space import write_when_there_is_room
from services.files.durable import make_directory, remove_directory, write_once
from services.files.job_dir import JobDir, JobsDir, numbered_in, versions_in

__all__ = [
    "AcceptedJob",
    "DamagedRecord",
    "JobRecords",
    "RecordConflict",
    "SavedJobs",
    "VersionRecord",
    "reported_steps",
]


class SavedJobs:
    """The records of all jobs. ``waits_for_room``: ``write`` waits where the disk is full, instead of raising."""

    def __init__(self, jobs_dir: JobsDir, *, waits_for_room: bool = False) -> None:
        self._jobs_dir = jobs_dir
        self.write = write_when_there_is_room if waits_for_room else asyncio.to_thread

    def of(self, job: str) -> JobRecords:
        return JobRecords(self._jobs_dir.job(job))

    def remove(self, job: str) -> None:
        self._jobs_dir.remove(job)


class JobRecords:
    """The records of one job; the first write makes its directory."""

    def __init__(self, job: JobDir) -> None:
        self._job = job

    def accept(self, job: AcceptedJob) -> AcceptedJob:
        """Write the job down; returns the one that was first accepted under this id."""
        _write(self._job.accepted, job)
        return self.accepted()

    def withdraw(self) -> None:
        """Forget a job that no caller was told of, and all that was prepared for it."""
        if not self._job.statuses.is_dir():
            remove_directory(self._job.path)

    def forget_prepared(self) -> None:
        """Remove what was prepared for a job that will not be accepted."""
        if not self._job.accepted.is_file():
            remove_directory(self._job.path)

    def accepted(self) -> AcceptedJob:
        """Raises FileNotFoundError, DamagedRecord."""
        return AcceptedJob(**_read(self._job.accepted))

    def write_status(self, revision: int, fields: Mapping[str, str]) -> bool:
        """False if the revision exists with another content. The words of its reason may have changed since."""
        path = self._job.status(revision)
        _write(path, fields)
        return _without_words(_read(path)) == _without_words(fields)

    def newest_status(self) -> tuple[int, dict[str, str]]:
        """Its revision and fields; (0, {}) before the first."""
        revisions = numbered_in(self._job.statuses)
        if not revisions:
            return 0, {}
        revision = max(revisions)
        return revision, _read(revisions[revision])

    def write_environment(self, index: int, description: Mapping[str, Any]) -> None:
        """The first description holds."""
        _write(self._job.environment(index), description, SCHEMA)

    def environments(self) -> dict[int, dict[str, Any]]:
        return {index: _read(path) for index, path in numbered_in(self._job.environments).items()}

    def write_version(self, record: VersionRecord) -> None:
        """Raises RecordConflict when the number names something else."""
        path = self._job.version_record(record.version)
        _write(path, record)
        if VersionRecord(**_read(path)) != record:
            raise RecordConflict(f"{path} names different weights")

    def versions(self) -> list[VersionRecord]:
        """All published versions, in order."""
        files = numbered_in(self._job.version_records)
        return [VersionRecord(**_read(files[version])) for version in sorted(files)]

    def highest_version(self) -> int:
        """The highest version with a record or with weights; -1 if there is none."""
        return max([*numbered_in(self._job.version_records), *versions_in(self._job.weights)], default=-1)

    def highest_epoch(self) -> int:
        return int(self.newest_status()[1].get("epoch", 0))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of the metrics file, without those that a crash cut off."""
        if not self._job.metrics.is_file():
            return
        with self._job.metrics.open("rb") as lines:
            yield from decode_metrics(lines)


def reported_steps(lines: Iterable[Mapping[str, Any]]) -> set[Position]:
    """The steps that lines of a metrics file report: those with a version. Others are of evaluations."""
    found = ((line.get("epoch"), line.get("step")) for line in lines if "version" in line)
    return {Position(epoch, step) for epoch, step in found if isinstance(epoch, int) and isinstance(step, int)}


def _without_words(status: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in status.items() if name != "reason_message"}


def _write(path: Path, record: Mapping[str, Any] | AcceptedJob | VersionRecord, schema: int = 1) -> None:
    if path.exists():
        return
    make_directory(path.parent)
    try:
        write_once(path, [encode_record(record, schema)])
    except FileExistsError:
        return


def _read(path: Path) -> dict[str, Any]:
    try:
        return decode_record(path.read_bytes())
    except DamagedRecord as error:
        raise DamagedRecord(f"{path}: {error}") from error
