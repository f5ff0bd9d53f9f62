"""Records that outlive Redis: the accepted job, its states, environments and versions, as files of the job's directory.

The rule: a file is written once and flushed before its content is acknowledged; states are numbered, and the highest
number holds. So the newest state wins, in whatever order writers come and however late one wakes up. It does not know
what a server has forgotten (``rebuild`` does) and holds no weights, batches or checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gspo_core.log.records import AcceptedJob, DamagedRecord, VersionRecord, decode_record, encode_record
from services.files.durable import make_directory, write_once
from services.files.job_dir import JobDir, numbered_in, versions_in

__all__ = ["AcceptedJob", "DamagedRecord", "JobRecords", "RecordConflict", "VersionRecord"]


class RecordConflict(Exception):
    """The name exists with another content."""


class JobRecords:
    """The records of one job; the first write makes its directory."""

    def __init__(self, job: JobDir) -> None:
        self._job = job

    def accept(self, job: AcceptedJob) -> AcceptedJob:
        """Write the job down; returns the one that was first accepted under this id."""
        _write(self._job.accepted, job)
        return self.accepted()

    def accepted(self) -> AcceptedJob:
        """Raises FileNotFoundError, DamagedRecord."""
        return AcceptedJob(**_read(self._job.accepted))

    def write_status(self, revision: int, fields: Mapping[str, str]) -> bool:
        """False if the revision exists with another content."""
        path = self._job.status(revision)
        _write(path, fields)
        return _read(path) == fields

    def newest_status(self) -> tuple[int, dict[str, str]]:
        """Its revision and fields; (0, {}) before the first."""
        revisions = numbered_in(self._job.statuses)
        if not revisions:
            return 0, {}
        revision = max(revisions)
        return revision, _read(revisions[revision])

    def write_environment(self, index: int, description: Mapping[str, Any]) -> None:
        """The first description holds."""
        _write(self._job.environment(index), description)

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
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record


def _write(path: Path, record: Mapping[str, Any] | AcceptedJob | VersionRecord) -> None:
    if path.exists():
        return
    make_directory(path.parent)
    try:
        write_once(path, [encode_record(record)])
    except FileExistsError:
        return


def _read(path: Path) -> dict[str, Any]:
    try:
        return decode_record(path.read_bytes())
    except DamagedRecord as error:
        raise DamagedRecord(f"{path}: {error}") from error
