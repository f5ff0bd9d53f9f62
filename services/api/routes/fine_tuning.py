"""The routes of OpenAI's fine-tuning API, for its client: the same jobs under other names."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from fastapi import Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gspo_core.problems import problems
from gspo_core.spec import JobSpec
from services.api.http import errors, listing, sse
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import documented
from services.api.http.listing import after_id
from services.api.http.routers import v1_router
from services.api.routes.events import check_position
from services.api.routes.jobs import IdempotencyKey, note_new, wish
from services.api.submission import submit
from services.api.submission.fine_tuning import (
    FineTuningEvent,
    FineTuningJob,
    FineTuningRequest,
    epoch_seconds,
    facade_event,
    facade_job,
    specification,
)
from services.api.views.checkpoint_views import described_of, places_of
from services.api.views.store_views import Page, View, page
from services.state.jobs import DesiredState, JobRecord
from services.state.store import JobNotFound

router = v1_router("OpenAI client")

JOBS = "/fine_tuning/jobs"


class FacadeQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""


class FacadeListQuery(FacadeQuery, listing.Labelled):
    """Jobs are also selected by `metadata[k]=v`."""


class FineTuningCheckpoint(View):
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    id: str
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: dict[str, float]


class ModelView(View):
    object: Literal["model"] = "model"
    id: str
    """`JOB@latest`."""
    created: int
    owned_by: str


@router.post(JOBS, responses=documented(409, 413, 415))
async def create(
    given: FineTuningRequest,
    request: Request,
    response: Response,
    context: ContextOf,
    idempotency_key: IdempotencyKey = None,
    x_stainless_retry_count: Annotated[int, Header(ge=0, le=1000)] = 0,
) -> FineTuningJob:
    """Submit a job. The client's automatic retries make no second job."""
    caller: Caller = request.scope["caller"]
    wanted = specification(given)
    try:
        spec = JobSpec.model_validate(wanted)
    except ValidationError as error:
        raise errors.invalid(problems(error, JobSpec, wanted)) from None
    is_repetition = x_stainless_retry_count > 0
    job_id = await context.resubmissions.job_id(caller.name, wanted, is_repetition=is_repetition)
    was_there = is_repetition and await _is_there(context, job_id)
    job = await submit.submit(context, spec, caller, key=idempotency_key, job_id=job_id, is_repetition=is_repetition)
    if job.id == job_id and not was_there:
        note_new(job)
    if job.id != job_id:
        response.headers["Idempotent-Replayed"] = "true"
    return facade_job(job)


async def _is_there(context: ApiContext, job_id: str) -> bool:
    try:
        await context.store.jobs.get(job_id)
    except JobNotFound:
        return False
    return True


@router.get(JOBS)
async def list_jobs(
    query: Annotated[FacadeListQuery, Query()], request: Request, context: ContextOf
) -> Page[FineTuningJob]:
    """Jobs, the newest first; `metadata[k]=v` selects."""
    found = await _jobs(context, request.scope["caller"], query, listing.asked(request.query_params.multi_items()))
    return page([facade_job(job) for job in found], query.limit)


@router.get(JOBS + "/{id}")
async def retrieve(id: str, context: ContextOf) -> FineTuningJob:
    """One job."""
    return facade_job(await context.store.jobs.get(id))


@router.post(JOBS + "/{id}/cancel", responses=documented(409))
async def cancel(id: str, context: ContextOf) -> FineTuningJob:
    """Cancel a job."""
    return await _wish(context, id, DesiredState.CANCELLED)


@router.post(JOBS + "/{id}/pause", responses=documented(409))
async def pause(id: str, context: ContextOf) -> FineTuningJob:
    """Ask a job to pause."""
    return await _wish(context, id, DesiredState.PAUSED)


@router.post(JOBS + "/{id}/resume", responses=documented(409))
async def resume(id: str, context: ContextOf) -> FineTuningJob:
    """Let a paused job go on."""
    return await _wish(context, id, DesiredState.RUNNING)


@router.get(JOBS + "/{id}/events")
async def list_events(id: str, query: Annotated[FacadeQuery, Query()], context: ContextOf) -> Page[FineTuningEvent]:
    """Events, the oldest first."""
    job = await context.store.jobs.get(id)
    position = check_position(query.after) or sse.BEGINNING
    events = await context.store.events.read(job.id, position, count=query.limit + 1)
    return page([facade_event(event) for event in events], query.limit)


@router.get(JOBS + "/{id}/checkpoints")
async def list_checkpoints(
    id: str, query: Annotated[FacadeQuery, Query()], context: ContextOf
) -> Page[FineTuningCheckpoint]:
    """Checkpoints that are kept, the newest first."""
    job = await context.store.jobs.get(id)
    job_dir = context.history.job_dir(job.id)
    places = after_id(await asyncio.to_thread(places_of, job_dir), query.after, query.limit)
    views = [
        FineTuningCheckpoint(
            id=one.id,
            created_at=epoch_seconds(one.created_at),
            fine_tuning_job_id=job.id,
            fine_tuned_model_checkpoint=one.id,
            step_number=one.step,
            metrics={},
        )
        for one in await asyncio.to_thread(described_of, job_dir, places)
    ]
    return page(views, query.limit)


@router.get("/models")
async def list_models(query: Annotated[FacadeQuery, Query()], request: Request, context: ContextOf) -> Page[ModelView]:
    """The published models of jobs: `JOB@latest` for each."""
    given = query.after
    inner = query.model_copy(update={"after": given.removesuffix("@latest") if given else None})
    found = await _jobs(context, request.scope["caller"], inner, {}, published=True)
    views = [
        ModelView(id=f"{job.id}@latest", created=epoch_seconds(job.created_at), owned_by=job.owner) for job in found
    ]
    return page(views, query.limit)


async def _wish(context: ContextOf, job: str, desired: DesiredState) -> FineTuningJob:
    return facade_job(await wish(context, job, desired))


async def _jobs(
    context: ContextOf, caller: Caller, query: FacadeQuery, metadata: dict[str, str], *, published: bool = False
) -> list[JobRecord]:
    found: list[JobRecord] = []
    after = query.after
    while len(found) <= query.limit:
        some = await context.store.jobs.page(101, after, order="desc")
        for job in some:
            if (
                listing.fits(job, metadata)
                and caller.sees(job.owner)
                and not (published and job.policy_version is None)
            ):
                found.append(job)
        if len(some) < 101:
            break
        after = some[-1].id
    return found
