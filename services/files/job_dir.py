"""The layout of a job's directory. No other module builds a path below it.

The rule: a name is written and parsed in one place, and parsing accepts only written names, so that a listing never
names a file that cannot be opened. It opens no file; ``gspo_core.log`` defines the bytes.

    job.json   status/00000042.json   environments/0.json   versions/00000007.json   metrics.jsonl   tensorboard/
    batches/ep000001-step000042   trained/ep000001-step000042
    checkpoints/ep000001-step000040/   exports/ep000001-step000040/   weights/v7/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gspo_core.staleness import Position

_STEP_NAME = re.compile(r"ep([0-9]{6,})-step([0-9]{6,})")
_VERSION_NAME = re.compile(r"v([0-9]+)")
_NUMBERED_NAME = re.compile(r"([0-9]+)\.json")


def step_name(at: Position) -> str:
    """The name of a file or directory of one step of one epoch."""
    return f"ep{at.epoch:06d}-step{at.step:06d}"


def parse_step_name(name: str) -> Position | None:
    """None for a text that ``step_name`` never gives."""
    match = _STEP_NAME.fullmatch(name)
    at = Position(int(match[1]), int(match[2])) if match else None
    return at if at is not None and step_name(at) == name else None


def version_name(version: int) -> str:
    return f"v{version}"


def parse_version_name(name: str) -> int | None:
    """None for a text that ``version_name`` never gives."""
    match = _VERSION_NAME.fullmatch(name)
    version = int(match[1]) if match else None
    return version if version is not None and version_name(version) == name else None


def positions_in(directory: Path) -> list[Position]:
    """The positions named in ``directory``, in order; none if it is missing."""
    found = (parse_step_name(name) for name in _names(directory))
    return sorted(at for at in found if at is not None)


def versions_in(directory: Path) -> list[int]:
    """The versions named in ``directory``, in order; none if it is missing."""
    found = (parse_version_name(name) for name in _names(directory))
    return sorted(version for version in found if version is not None)


def numbered_in(directory: Path) -> Mapping[int, Path]:
    """The numbered records in ``directory``, in no order."""
    found = ((_NUMBERED_NAME.fullmatch(name), directory / name) for name in _names(directory))
    return {int(match[1]): path for match, path in found if match}


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


@dataclass(frozen=True, slots=True)
class JobDir:
    """The directory of one job. Its name is the job's id."""

    path: Path

    @classmethod
    def around(cls, log: Path) -> JobDir:
        """The directory for ``log``, a file of one step."""
        return cls(log.absolute().parent.parent)

    @property
    def id(self) -> str:
        return self.path.name

    def shown(self, path: Path) -> str:
        """``path`` for people: relative to the data directory."""
        return str(path.relative_to(self.path.parents[1]))

    # One file or directory for each step

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    def batch(self, at: Position) -> Path:
        return self.batches / step_name(at)

    @property
    def trained(self) -> Path:
        return self.path / "trained"

    def trained_at(self, at: Position) -> Path:
        return self.trained / step_name(at)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def export(self, at: Position) -> Path:
        return self.path / "exports" / step_name(at)

    # Weights

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    def version(self, version: int) -> Path:
        return self.weights / version_name(version)

    # Records

    @property
    def accepted(self) -> Path:
        return self.path / "job.json"

    @property
    def statuses(self) -> Path:
        return self.path / "status"

    def status(self, revision: int) -> Path:
        return self.statuses / f"{revision:08d}.json"

    @property
    def environments(self) -> Path:
        return self.path / "environments"

    def environment(self, index: int) -> Path:
        return self.environments / f"{index}.json"

    @property
    def version_records(self) -> Path:
        return self.path / "versions"

    def version_record(self, version: int) -> Path:
        return self.version_records / f"{version:08d}.json"

    # Numbers

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"


@dataclass(frozen=True, slots=True)
class JobsDir:
    """The directory that holds the jobs."""

    path: Path

    def job(self, job: str) -> JobDir:
        return JobDir(self.path / job)

    def accepted(self) -> dict[str, JobDir]:
        """Every job that was accepted, by id."""
        jobs = (self.job(name) for name in sorted(_names(self.path)))
        return {job.id: job for job in jobs if job.accepted.is_file()}

    def is_empty(self) -> bool:
        return not _names(self.path)
