"""The checkpoints of a job as they lie on disk, and what has been exported of them. It reads names and sizes only."""

from __future__ import annotations

import contextlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

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


def checkpoints_of(job: str, job_dir: Path) -> list[CheckpointView]:
    """The newest first."""
    root = job_dir / "checkpoints"
    names = [_NAME.fullmatch(one.name) for one in root.iterdir()] if root.is_dir() else []
    positions = sorted(((int(one[1]), int(one[2]), one[0]) for one in names if one), reverse=True)
    found = (_view(job, epoch, step, root / name) for epoch, step, name in positions)
    return [one for one in found if one is not None]


def files_of(path: Path) -> list[CheckpointFile]:
    """Fewer while the checkpoint is removed."""
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                file = Path(folder, name)
                found.append(CheckpointFile(path=str(file.relative_to(path)), size_bytes=file.stat().st_size))
    return sorted(found, key=lambda one: one.path)


def _view(job: str, epoch: int, step: int, path: Path) -> CheckpointView | None:
    """None: its trainer has removed it in this moment."""
    try:
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except FileNotFoundError:
        return None
    return CheckpointView(
        id=f"{job}/{epoch}/{step}",
        job_id=job,
        epoch=epoch,
        step=step,
        created_at=changed.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        size_bytes=sum(file.size_bytes for file in files_of(path)),
    )
