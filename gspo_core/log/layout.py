"""The names of a job's files, below its directory or in a bundle of it.

The rule: a name is written and parsed in one place, and parsing accepts only written names. It knows no directory and
opens no file.

    job.json   status/00000042.json   environments/0.json   versions/00000007.json   metrics.jsonl   tensorboard/
    batches/ep000001-step000042   trained/ep000001-step000042   archive/ep000001-step000007
    checkpoints/epoch000001.json   checkpoints/ep000001-step000040/   exports/ep000001-step000040/   weights/v7/
    replays/0a1b2c3d4e5f6071.json   replays/0a1b2c3d4e5f6071.answer.json
"""

from __future__ import annotations

import re
from typing import Protocol, Self, TypeVar

from gspo_core.position import Position


class Folder(Protocol):
    """The part of a path that names what is below it."""

    def __truediv__(self, name: str, /) -> Self: ...


FolderT = TypeVar("FolderT", bound=Folder)


JOBS = "jobs"

# Below a job's directory.
ACCEPTED = "job.json"
STATUSES = "status"
ENVIRONMENTS = "environments"
VERSIONS = "versions"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
BATCHES = "batches"
# Compressed batch logs, named alike.
ARCHIVE = "archive"
TRAINED = "trained"
CHECKPOINTS = "checkpoints"
EXPORTS = "exports"
WEIGHTS = "weights"
# Answers of the API to what was asked of trained steps.
REPLAYS = "replays"
# In a forked job: what was copied from its parent, named as in the parent's directory.
ORIGIN = "origin"
# In a job that is trained on recorded episodes: those episodes.
RECORDED = "recorded"

# Below a checkpoint.
CHECKPOINT_MANIFEST = "checkpoint.json"
LINEAGE_OF_FORMAT_1 = "lineage.json"
LEARNER = "learner"
LEARNER_MANIFEST = f"{LEARNER}/learner.json"

# Below a version of the weights.
WEIGHTS_MANIFEST = "manifest.json"

# Six digits, or more without a leading zero: as ``step_name`` writes them.
_STEP_NAME = re.compile(r"ep([0-9]{6}|[1-9][0-9]{6,})-step([0-9]{6}|[1-9][0-9]{6,})")
_VERSION_NAME = re.compile(r"v([0-9]+)")
NUMBERED_NAME = re.compile(r"([0-9]+)\.json")
_FORK_RECORD = re.compile(r"epoch(\d+)(?:\.copy)?\.json")


def step_name(at: Position) -> str:
    """The name of a file or directory of one step of one epoch."""
    return f"ep{at.epoch:06d}-step{at.step:06d}"


def parse_step_name(name: str) -> Position | None:
    """None for a text that ``step_name`` never gives."""
    match = _STEP_NAME.fullmatch(name)
    return Position(int(match[1]), int(match[2])) if match else None


def version_name(version: int) -> str:
    return f"v{version}"


def parse_version_name(name: str) -> int | None:
    """None for a text that ``version_name`` never gives."""
    match = _VERSION_NAME.fullmatch(name)
    version = int(match[1]) if match else None
    return version if version is not None and version_name(version) == name else None


def numbered_name(number: int) -> str:
    """File name of a state's or a version's record."""
    return f"{number:08d}.json"


def fork_records(epoch: int) -> tuple[str, str]:
    """Where an epoch forked off, in two copies: the whole run depends on these few bytes."""
    name = f"epoch{epoch:06d}"
    return f"{name}.json", f"{name}.copy.json"


def epoch_of_fork_record(name: str) -> int | None:
    match = _FORK_RECORD.fullmatch(name)
    return int(match[1]) if match else None


def job_folder(data_dir: FolderT, job: str) -> FolderT:
    """The directory of a job below the data directory."""
    return data_dir / JOBS / job
