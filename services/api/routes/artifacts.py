"""What a job leaves behind: its versions, its checkpoints, and the environments as its workers described them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from services.api.context import ContextOf
from services.api.errors import ApiError
from services.api.views import Page, View, page

router = APIRouter(prefix="/jobs/{id}", tags=["artifacts"])

_CHECKPOINT = re.compile(r"ep(\d+)-step(\d+)")


class ArtifactQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""


class VersionView(View):
    """A published version of a job's weights."""

    object: Literal["version"] = "version"
    id: str
    """`JOB/EPOCH/VERSION`: the label that an engine carries which has these weights."""
    version: int
    epoch: int
    step: int
    parent: int | None
    """The version that these weights were trained from, or are."""
    size_bytes: int
    is_kept: bool
    """Whether its files are still there."""
    loaded_by: list[str]
    """Engines that carry its label now."""


class CheckpointView(View):
    """A point from which a trainer can go on."""

    object: Literal["checkpoint"] = "checkpoint"
    id: str
    job_id: str
    epoch: int
    step: int
    created_at: str
    size_bytes: int


class JobEnvironmentView(View):
    """An environment of a job, as a rollout worker that loaded it described it."""

    object: Literal["job.environment"] = "job.environment"
    id: str
    index: int
    ref: str
    config: dict[str, Any]
    weight: float
    description: dict[str, Any] | None
    """`num_tasks`, `tools`, `limits` and so on; null until a worker has loaded it."""


@router.get("/versions")
async def list_versions(id: str, query: Annotated[ArtifactQuery, Query()], context: ContextOf) -> Page[VersionView]:
    """Published versions, the newest first."""
    job = await context.store.get_job(id)
    manifests = {one.version: one for one in await context.store.versions(job.id)}
    engines = await context.store.engines()
    weights = context.history.job_dir(job.id) / "weights"
    rows = [
        VersionView(
            id=manifests[row.version].label,
            version=row.version,
            epoch=row.epoch,
            step=row.step,
            parent=row.parent,
            size_bytes=sum(file.size_bytes for file in manifests[row.version].files),
            is_kept=False,
            loaded_by=[str(one["id"]) for one in engines if one.get("label") == manifests[row.version].label],
        )
        for row in reversed(await context.store.version_table(job.id))
        if row.version in manifests
    ]
    shown = page(_after(rows, query.after, query.limit), query.limit)
    kept = await asyncio.to_thread(lambda: {one.id for one in shown.data if (weights / f"v{one.version}").is_dir()})
    return shown.model_copy(update={"data": [one.model_copy(update={"is_kept": one.id in kept}) for one in shown.data]})


@router.get("/checkpoints")
async def list_checkpoints(
    id: str, query: Annotated[ArtifactQuery, Query()], context: ContextOf
) -> Page[CheckpointView]:
    """Checkpoints that are kept, the newest first."""
    job = await context.store.get_job(id)
    root = context.history.job_dir(job.id) / "checkpoints"
    found = await asyncio.to_thread(_checkpoints, job.id, root)
    return page(_after(found, query.after, query.limit), query.limit)


@router.get("/environments")
async def list_job_environments(id: str, context: ContextOf) -> Page[JobEnvironmentView]:
    """The environments of a job, in the order of its specification."""
    job = await context.store.get_job(id)
    views = [
        JobEnvironmentView(
            id=f"{job.id}/{index}",
            index=index,
            ref=str(one.get("ref")),
            config=one.get("config") or {},
            weight=float(one.get("weight", 1.0)),
            description=await context.store.environment_description(job.id, index),
        )
        for index, one in enumerate(job.spec_data.get("environments", ()))
    ]
    return page(views, max(1, len(views)))


def _checkpoints(job: str, root: Path) -> list[CheckpointView]:
    names = [_CHECKPOINT.fullmatch(one.name) for one in root.iterdir()] if root.is_dir() else []
    positions = sorted(((int(one[1]), int(one[2]), one[0]) for one in names if one), reverse=True)
    return [
        CheckpointView(
            id=f"{job}/{epoch}/{step}",
            job_id=job,
            epoch=epoch,
            step=step,
            created_at=_time_of(root / name),
            size_bytes=sum(file.stat().st_size for file in (root / name).rglob("*") if file.is_file()),
        )
        for epoch, step, name in positions
    ]


def _time_of(path: Path) -> str:
    changed = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return changed.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _after(items: Sequence[Any], after: str | None, limit: int) -> Sequence[Any]:
    if after is None:
        return items[: limit + 1]
    ids = [one.id for one in items]
    if after not in ids:
        raise ApiError(400, "invalid_cursor", f"{after[:80]!r} is no item of this list", param="after")
    start = ids.index(after) + 1
    return items[start : start + limit + 1]
