"""The artifacts of a job: versions, checkpoints, and environments as its workers described them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from services.api.http.context import ContextOf
from services.api.http.paging import after_id
from services.api.http.requests import StrictRoute
from services.api.views.checkpoint_views import CheckpointView, checkpoints_of
from services.api.views.store_views import Page, View, page
from services.files.weights import WeightStore

router = APIRouter(prefix="/jobs/{id}", tags=["artifacts"], route_class=StrictRoute)


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
    config: dict[str, Any]
    weight: float
    description: dict[str, Any] | None
    """`num_tasks`, `tools`, `limits` and so on; null until a worker has loaded it."""


@router.get("/versions")
async def list_versions(id: str, query: Annotated[ArtifactQuery, Query()], context: ContextOf) -> Page[VersionView]:
    """Published versions, the newest first."""
    job = await context.store.jobs.get(id)
    manifests = {one.version: one for one in await context.store.versions.all(job.id)}
    engines = await context.store.fleet.engines()
    weights = WeightStore(context.history.job_dir(job.id))
    rows = [
        VersionView(
            id=manifests[row.version].label,
            version=row.version,
            epoch=row.epoch,
            step=row.step,
            parent=row.parent,
            size_bytes=sum(file.size_bytes for file in manifests[row.version].files),
            is_kept=False,
            loaded_by=[one.id for one in engines if one.label == manifests[row.version].label],
        )
        for row in reversed(await context.store.versions.table(job.id))
        if row.version in manifests
    ]
    shown = page(after_id(rows, query.after, query.limit), query.limit)
    kept = await asyncio.to_thread(lambda: {one.id for one in shown.data if weights.has(one.version)})
    return shown.model_copy(update={"data": [one.model_copy(update={"is_kept": one.id in kept}) for one in shown.data]})


@router.get("/checkpoints")
async def list_checkpoints(
    id: str, query: Annotated[ArtifactQuery, Query()], context: ContextOf
) -> Page[CheckpointView]:
    """Kept checkpoints, the newest first."""
    job = await context.store.jobs.get(id)
    found = await asyncio.to_thread(checkpoints_of, context.history.job_dir(job.id))
    return page(after_id(found, query.after, query.limit), query.limit)


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
