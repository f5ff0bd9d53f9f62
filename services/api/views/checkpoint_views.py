"""The checkpoints of a job on disk, and their exports. It reads names and sizes only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from gspo_core.staleness import Position
from services.api.views.store_views import View
from services.files.checkpoint_storage import Stored
from services.files.checkpoints import CheckpointStore
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
    """Why it failed."""


class CheckpointDetail(CheckpointView):
    """A checkpoint with its files."""

    files: list[CheckpointFile]
    export: ExportView


def checkpoints_of(job: JobDir) -> list[CheckpointView]:
    """The newest first."""
    store = CheckpointStore(job)
    found = (_view(store, job.id, position) for position in reversed(store.positions()))
    return [one for one in found if one is not None]


def files_of(stored: Stored) -> list[CheckpointFile]:
    files = [CheckpointFile(path=file.path, size_bytes=file.size_bytes) for file in stored.files]
    return sorted(files, key=lambda one: one.path)


def _view(store: CheckpointStore, job: str, position: Position) -> CheckpointView | None:
    """None if the trainer has just removed it."""
    try:
        stored = store.describe(position)
    except FileNotFoundError:
        return None
    changed = datetime.fromtimestamp(stored.changed_at, UTC)
    return CheckpointView(
        id=f"{job}/{position.epoch}/{position.step}",
        job_id=job,
        epoch=position.epoch,
        step=position.step,
        created_at=changed.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        size_bytes=sum(file.size_bytes for file in stored.files),
    )
