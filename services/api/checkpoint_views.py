"""The checkpoints of a job as they lie on disk, and what has been exported of them. It reads names and sizes only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from services.api.errors import ApiError
from services.api.views import View

_NAME = re.compile(r"ep(\d+)-step(\d+)")


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
    """Below `GSPO_DATA_DIR`, as soon as it is there."""
    message: str | None
    """Why it failed."""


class CheckpointDetail(CheckpointView):
    """A checkpoint with its files."""

    files: list[CheckpointFile]
    export: ExportView


Item = TypeVar("Item", bound=View)


def checkpoints_of(job: str, job_dir: Path) -> list[CheckpointView]:
    """The newest first."""
    root = job_dir / "checkpoints"
    names = [_NAME.fullmatch(one.name) for one in root.iterdir()] if root.is_dir() else []
    positions = sorted(((int(one[1]), int(one[2]), one[0]) for one in names if one), reverse=True)
    return [_view(job, epoch, step, root / name) for epoch, step, name in positions]


def files_of(path: Path) -> list[CheckpointFile]:
    found = sorted(file for file in path.rglob("*") if file.is_file())
    return [CheckpointFile(path=str(one.relative_to(path)), size_bytes=one.stat().st_size) for one in found]


def after_id(items: Sequence[Item], after: str | None, limit: int) -> Sequence[Item]:
    """From behind the item ``after`` on, one more than ``limit``."""
    if after is None:
        return items[: limit + 1]
    ids = [str(getattr(one, "id", None)) for one in items]
    if after not in ids:
        raise ApiError(400, "invalid_cursor", f"{after[:80]!r} is no item of this list", param="after")
    start = ids.index(after) + 1
    return items[start : start + limit + 1]


def _view(job: str, epoch: int, step: int, path: Path) -> CheckpointView:
    changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return CheckpointView(
        id=f"{job}/{epoch}/{step}",
        job_id=job,
        epoch=epoch,
        step=step,
        created_at=changed.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        size_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    )
