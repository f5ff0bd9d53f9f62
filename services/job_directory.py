"""What outlives Redis: the accepted job, its states, environments and versions, as files of the job's directory.

The rule: a file is written once, flushed, and there before anything that it says is acknowledged; states are numbered,
and the highest number holds. So whatever order writers come in, and however late one wakes up, the newest state wins.
It does not know which server forgot what (``rebuild`` does) and holds no weights, batches or checkpoints.

    job.json   status/00000042.json   environments/0.json   versions/00000007.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.durable import make_directory, write_once

_NUMBERED = re.compile(r"(\d+)\.json")
_WEIGHTS = re.compile(r"v(\d+)")


class DamagedRecord(Exception):
    """A file of a job's directory is not what was written."""


class RecordConflict(Exception):
    """Another content was written under the same name before."""


@dataclass(frozen=True, slots=True)
class AcceptedJob:
    spec: str
    digest: str
    created_at: str
    idempotency: str | None = None
    """Digest of the client's key."""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    version: int
    step: int
    manifest: str


class JobDirectory:
    """The directory of one job; it is made by the first write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def accept(self, job: AcceptedJob) -> AcceptedJob:
        """Write the job down; returns what was accepted first under this id."""
        self._write(self.path / "job.json", asdict(job))
        return self.accepted()

    def accepted(self) -> AcceptedJob:
        """Raises FileNotFoundError, DamagedRecord."""
        return AcceptedJob(**_read(self.path / "job.json"))

    def write_status(self, revision: int, fields: Mapping[str, str]) -> bool:
        """False: the revision is there with another content."""
        path = self.path / "status" / f"{revision:08d}.json"
        self._write(path, fields)
        return _read(path) == fields

    def newest_status(self) -> tuple[int, dict[str, str]]:
        """Its revision and fields; (0, {}) when nothing was written down yet."""
        revisions = _numbered(self.path / "status")
        if not revisions:
            return 0, {}
        revision = max(revisions)
        return revision, _read(revisions[revision])

    def write_environment(self, index: int, description: Mapping[str, Any]) -> None:
        """The first description holds."""
        self._write(self.path / "environments" / f"{index}.json", dict(description))

    def environments(self) -> dict[int, dict[str, Any]]:
        return {index: _read(path) for index, path in _numbered(self.path / "environments").items()}

    def write_version(self, record: VersionRecord) -> None:
        """Raises RecordConflict when the number names something else."""
        path = self.path / "versions" / f"{record.version:08d}.json"
        self._write(path, asdict(record))
        if VersionRecord(**_read(path)) != record:
            raise RecordConflict(f"{path} names other weights")

    def versions(self) -> list[VersionRecord]:
        """All that were published, in order."""
        files = _numbered(self.path / "versions")
        return [VersionRecord(**_read(files[version])) for version in sorted(files)]

    def highest_version(self) -> int:
        """Of those that were published and those whose weights were written; -1 if there are none."""
        weights = self.path / "weights"
        names = (_WEIGHTS.fullmatch(entry.name) for entry in (weights.iterdir() if weights.is_dir() else ()))
        written = [int(match[1]) for match in names if match]
        return max([*_numbered(self.path / "versions"), *written], default=-1)

    def highest_epoch(self) -> int:
        return int(self.newest_status()[1].get("epoch", 0))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The lines of the metrics file; one that was cut off by a crash is passed over."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record

    def _write(self, path: Path, record: Mapping[str, Any]) -> None:
        if path.exists():
            return
        make_directory(path.parent)
        try:
            write_once(path, [json.dumps(record, sort_keys=True, allow_nan=False).encode()])
        except FileExistsError:
            return


def job_directories(root: Path) -> dict[str, JobDirectory]:
    """Every job that was accepted below ``root``, by id."""
    if not root.is_dir():
        return {}
    return {path.name: JobDirectory(path) for path in sorted(root.iterdir()) if (path / "job.json").is_file()}


def _numbered(directory: Path) -> dict[int, Path]:
    if not directory.is_dir():
        return {}
    found = ((_NUMBERED.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedRecord(f"{path}: {error}") from error
    if not isinstance(record, dict):
        raise DamagedRecord(f"{path} holds no record")
    return record
