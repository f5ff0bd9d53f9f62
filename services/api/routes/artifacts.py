"""The artifacts of a job: versions, checkpoints, and environments as its workers described them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused
from services.api.http.listing import after_id
from services.api.http.routers import v1_router
from services.api.views.checkpoint_views import CheckpointView, described_of, places_of
from services.api.views.store_views import Page, Said, View, page
from services.files.job_dir import JobDir
from services.files.weights import WeightStore

router = v1_router("artifacts", "/jobs/{id}")


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
    """`JOB/EPOCH/VERSION`: the label of engines that hold these weights."""
    version: int
    epoch: int
    step: int
    parent: int | None
    """The version that these weights were trained from, or are identical to."""
    size_bytes: int
    is_kept: bool
    """Whether its files still exist."""
    loaded_by: list[str]
    """Engines that hold its label now."""


class JobEnvironmentView(View):
    """An environment of a job, as a rollout worker that loaded it described it."""

    object: Literal["job.environment"] = "job.environment"
    id: str
    index: int
    ref: str
    config: Said[dict[str, Any]]
    weight: float
    description: Said[dict[str, Any] | None]
    """`num_tasks`, `tools`, `limits` and so on; null until a worker has loaded it."""


@router.get("/versions")
async def list_versions(id: str, query: Annotated[ArtifactQuery, Query()], context: ContextOf) -> Page[VersionView]:
    """Published versions, the newest first."""
    job = await context.store.jobs.get(id)
    found = await context.store.versions.newest(
        job.id, query.limit + 1, below=await _cursor(context, job.id, query.after)
    )
    engines = await context.store.fleet.engines()
    weights = WeightStore(context.history.job_dir(job.id))
    kept = await asyncio.to_thread(lambda: {row.version for row, _ in found if weights.has(row.version)})
    rows = [
        VersionView(
            id=manifest.label,
            version=row.version,
            epoch=row.epoch,
            step=row.step,
            parent=row.parent,
            size_bytes=sum(file.size_bytes for file in manifest.files),
            is_kept=row.version in kept,
            loaded_by=[one.id for one in engines if one.label == manifest.label],
        )
        for row, manifest in found
    ]
    return page(rows, query.limit)


async def _cursor(context: ApiContext, job: str, after: str | None) -> int | None:
    """The version that a page begins below. Raises RequestRefused."""
    if after is None:
        return None
    number = after.rpartition("/")[2]
    if number.isdecimal() and len(number) < 16:
        found = await context.store.versions.newest(job, 1, below=int(number) + 1)
        if [manifest.label for _, manifest in found] == [after]:
            return int(number)
    raise RequestRefused(400, "invalid_cursor", f"{after[:80]!r} is not in this list", param="after")


@router.get("/checkpoints")
async def list_checkpoints(
    id: str, query: Annotated[ArtifactQuery, Query()], context: ContextOf
) -> Page[CheckpointView]:
    """Kept checkpoints, the newest first; those that the job left when it went back come last."""
    job = await context.store.jobs.get(id)
    return await asyncio.to_thread(_checkpoints, context.history.job_dir(job.id), query)


def _checkpoints(job: JobDir, query: ArtifactQuery) -> Page[CheckpointView]:
    return page(described_of(job, after_id(places_of(job), query.after, query.limit)), query.limit)


@router.get("/environments")
async def list_job_environments(id: str, context: ContextOf) -> Page[JobEnvironmentView]:
    """The environments of a job, in the order of its specification."""
    job = await context.store.jobs.get(id)
    views = [
        JobEnvironmentView(
            id=f"{job.id}/{index}",
            index=index,
            ref=str(one.get("ref")),
            config=one.get("config") or {},
            weight=float(one.get("weight", 1.0)),
            description=await context.store.environments.get(job.id, index),
        )
        for index, one in enumerate(job.spec_data.get("environments", ()))
    ]
    return page(views, max(1, len(views)))
