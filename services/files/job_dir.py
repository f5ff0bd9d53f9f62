"""The layout of a job's directory. No other module builds a path below it.

The rule: names come from ``gspo_core.log.layout``, which a bundle shares, and a listing never names a file that cannot
be opened. It opens no file; ``gspo_core.log`` defines the bytes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from gspo_core.log import layout
from gspo_core.log.layout import (
    NUMBERED_NAME,
    parse_step_name,
    parse_version_name,
    step_name,
    version_name,
)
from gspo_core.position import Position

__all__ = [
    "JobDir",
    "JobsDir",
    "numbered_in",
    "parse_step_name",
    "parse_version_name",
    "positions_in",
    "step_name",
    "version_name",
    "versions_in",
]


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
    found = ((NUMBERED_NAME.fullmatch(name), directory / name) for name in _names(directory))
    return {int(match[1]): path for match, path in found if match}


_REMOVED = ".removed-"


def _names(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


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
        return self.path / layout.BATCHES

    def batch(self, at: Position) -> Path:
        return self.batches / step_name(at)

    @property
    def archive(self) -> Path:
        return self.path / layout.ARCHIVE

    def archived(self, at: Position) -> Path:
        return self.archive / step_name(at)

    @property
    def trained(self) -> Path:
        return self.path / layout.TRAINED

    def trained_at(self, at: Position) -> Path:
        return self.trained / step_name(at)

    @property
    def checkpoints(self) -> Path:
        return self.path / layout.CHECKPOINTS

    @property
    def exports(self) -> Path:
        return self.path / layout.EXPORTS

    def export(self, at: Position) -> Path:
        return self.exports / step_name(at)

    @property
    def replays(self) -> Path:
        return self.path / layout.REPLAYS

    # Weights

    @property
    def weights(self) -> Path:
        return self.path / layout.WEIGHTS

    def version(self, version: int) -> Path:
        return self.weights / version_name(version)

    # Records

    @property
    def accepted(self) -> Path:
        return self.path / layout.ACCEPTED

    @property
    def statuses(self) -> Path:
        return self.path / layout.STATUSES

    def status(self, revision: int) -> Path:
        return self.statuses / layout.numbered_name(revision)

    @property
    def environments(self) -> Path:
        return self.path / layout.ENVIRONMENTS

    def environment(self, index: int) -> Path:
        return self.environments / f"{index}.json"

    @property
    def version_records(self) -> Path:
        return self.path / layout.VERSIONS

    def version_record(self, version: int) -> Path:
        return self.version_records / layout.numbered_name(version)

    @property
    def origin(self) -> JobDir:
        """What a forked job was brought of its parent."""
        return JobDir(self.path / layout.ORIGIN)

    @property
    def recorded(self) -> JobDir:
        """The recorded episodes that a job is trained on."""
        return JobDir(self.path / layout.RECORDED)

    # Numbers

    @property
    def metrics(self) -> Path:
        return self.path / layout.METRICS

    @property
    def tensorboard(self) -> Path:
        return self.path / layout.TENSORBOARD


@dataclass(frozen=True, slots=True)
class JobsDir:
    """The directory that holds the jobs."""

    path: Path

    def job(self, job: str) -> JobDir:
        return JobDir(self.path / job)

    def remove(self, job: str) -> None:
        """Removes all files of a job, at one moment for readers; it may be gone already. The rest of an earlier,
        interrupted removal goes, too."""
        gone = self.path / f"{_REMOVED}{job}"
        with contextlib.suppress(FileNotFoundError):
            (self.path / job).rename(gone.with_name(f"{gone.name}-{uuid4().hex}"))
        for name in _names(self.path):
            if name.startswith(_REMOVED):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def accepted(self) -> dict[str, JobDir]:
        """Every job that was accepted, by id."""
        return {job.id: job for job in self.unopened() if job.accepted.is_file()}

    def unopened(self) -> list[JobDir]:
        """Every job by its name alone, in order; folders that are no job's may be among them."""
        return [self.job(name) for name in sorted(_names(self.path)) if not name.startswith(_REMOVED)]

    def is_empty(self) -> bool:
        return not _names(self.path)
