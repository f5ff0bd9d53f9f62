"""The checkpoints of a job on disk, and their exports. It reads names and sizes only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from gspo_core.position import Position
from services.api.views.store_views import View
from services.files.job_dir import JobDir


class CheckpointFile(View):
    path: str
    size_bytes: int


class CheckpointView(View):
    """A point from which a trainer can go on."""

    object: Literal["checkpoint"] = "checkpoint"
    id: str
    """`JOB/EPOCH/STEP`; `/v1/checkpoints/` + id shows it."""
    job_id: str
    epoch: int
    step: int
    created_at: str
    size_bytes: int


class ExportView(View):
    """Its weights as a plain model directory."""

    object: Literal["checkpoint.export"] = "checkpoint.export"
    status: Literal["none", "exporting", "ready", "failed"]
    path: str | None
    """Below `GSPO_DATA_DIR`, once it is ready."""
    message: str | None
    """Why it failed, what it waits for, or why its files are not listed."""
    files: list[CheckpointFile]
    """Once it is ready: each is found at `/export/files/` + path."""
    written_at: str | None
    """When it was, once it is ready: files of one export have been fetched where this is as it was."""


class CheckpointDetail(CheckpointView):
    """A checkpoint with its files."""

    files: list[CheckpointFile]
    export: ExportView


@dataclass(frozen=True)
class CheckpointPlace:
    """A checkpoint that was not looked at yet."""

    id: str
    at: Position
    is_of_history: bool
    """A trainer would go on from it: the job did not leave it when it went back."""


def places_of(job: JobDir) -> list[CheckpointPlace]:
    """The newest first, by their names alone; behind them those that the job has left when it went back."""
    from services.files.checkpoints import CheckpointStore  # the pages of most jobs are read without

    store = CheckpointStore(job)
    kept = store.positions()
    history = store.of_the_history(kept)
    newest_first = sorted(kept, key=lambda at: (at in history, at), reverse=True)
    return [CheckpointPlace(_id(job.id, at), at, at in history) for at in newest_first]


def described_of(job: JobDir, places: Iterable[CheckpointPlace]) -> list[CheckpointView]:
    """Those of a page alone are looked at: a job may keep as many as it likes."""
    found = (described(job, one.at) for one in places)
    return [one for one in found if one is not None]


def described(job: JobDir, at: Position) -> CheckpointView | None:
    """None if there is none, or the trainer has just removed it."""
    from services.files.checkpoints import CheckpointStore

    try:
        stored = CheckpointStore(job).describe(at)
    except FileNotFoundError:
        return None
    changed = datetime.fromtimestamp(stored.changed_at, UTC)
    return CheckpointView(
        id=_id(job.id, at),
        job_id=job.id,
        epoch=at.epoch,
        step=at.step,
        created_at=changed.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        size_bytes=sum(file.size_bytes for file in stored.files),
    )


def files_of(job: JobDir, at: Position) -> list[CheckpointFile]:
    """Raises FileNotFoundError."""
    from services.files.checkpoints import CheckpointStore

    stored = CheckpointStore(job).describe(at)
    files = [CheckpointFile(path=file.path, size_bytes=file.size_bytes) for file in stored.files]
    return sorted(files, key=lambda one: one.path)


def _id(job: str, at: Position) -> str:
    return f"{job}/{at.epoch}/{at.step}"
