"""Jobs: submit, look at, list, cancel."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gspo_core.spec import JobSpec, spec_warnings
from services.api.http import metadata_filter
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused, documented
from services.api.http.etags import IfNoneMatch, tagged
from services.api.http.requests import StrictRoute
from services.api.http.stored_specs import readable_spec
from services.api.submission import submit as submitting
from services.api.submission.environment_refs import pin
from services.api.views.store_views import ConfigView, JobView, Page, PlanView, estimate, job_view, page
from services.state.jobs import CancelManner, DesiredState, JobRecord, JobStatus, new_job_id

router = APIRouter(prefix="/jobs", tags=["jobs"], route_class=StrictRoute)

IdempotencyKey = Annotated[str | None, Header(max_length=255, pattern=r"^[\x21-\x7e]+$")]


class SubmittedSpec(JobSpec):
    """The specification of a job, as its user writes it."""

    # Built with the routes: only then does the framework silence warnings about its own use of fields.
    model_config = ConfigDict(defer_build=False)


class SubmitQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    dry_run: bool = False
    """Check and estimate; create nothing."""


class JobListQuery(metadata_filter.Labelled):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""
    before: str | None = None
    """Id of the item behind the page, which holds those that come right before it; `has_more` then means: before
    these."""
    order: Literal["asc", "desc"] = "asc"
    """By age: oldest or newest first."""
    status: JobStatus | None = None
    """Only jobs in this state."""


class CancelQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    mode: Literal["now", "drain"] = "now"
    """`drain` starts nothing new, and plays and trains what is under way, as far as it fills steps."""
    checkpoint: bool = False
    """Write a checkpoint at the end; with `now` the step that it is in is taken first."""


@router.post(
    "",
    status_code=201,
    response_model=JobView,
    responses={
        200: {"model": PlanView, "description": "What the job would be (`dry_run=true`)"},
        **documented(409, 413, 415),
    },
)
async def submit(
    spec: SubmittedSpec,
    query: Annotated[SubmitQuery, Query()],
    request: Request,
    response: Response,
    context: ContextOf,
    idempotency_key: IdempotencyKey = None,
) -> JobView | Response:
    """Submit a job. With an `Idempotency-Key` it may be repeated: the same key never makes a second job."""
    caller: Caller = request.scope["caller"]
    if query.dry_run:
        spec = await asyncio.to_thread(submitting.pin_model, spec, context.hub)
        await submitting.check_model(context, spec.model)
        spec = await asyncio.to_thread(pin, spec, context.registry, caller, context.networks)
        plan = await _plan(spec, context)
        return Response(plan.model_dump_json(), media_type="application/json")
    fresh_id = new_job_id(time.time())
    job = await submitting.submit(context, spec, caller, key=idempotency_key, job_id=fresh_id)
    if job.id != fresh_id:
        response.headers["Idempotent-Replayed"] = "true"
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job_view(job)


@router.get("")
async def list_jobs(query: Annotated[JobListQuery, Query()], request: Request, context: ContextOf) -> Page[JobView]:
    """Jobs by age; only admins see those of others. `metadata[NAME]=VALUE` selects by metadata."""
    caller: Caller = request.scope["caller"]
    wanted = metadata_filter.asked(request.query_params.multi_items())
    if query.after is not None and query.before is not None:
        raise RequestRefused(400, "invalid_cursor", "after and before are mutually exclusive", param="before")
    is_backwards = query.before is not None
    after = query.before if is_backwards else query.after
    order = query.order if not is_backwards else "desc" if query.order == "asc" else "asc"
    jobs: list[JobRecord] = []
    while len(jobs) <= query.limit:
        some = await context.store.jobs.page(101, after, order=order)
        seen = [job for job in some if query.status in (None, job.status) and caller.sees(job.owner)]
        jobs += [job for job in seen if metadata_filter.fits(job, wanted)]
        if len(some) < 101:
            break
        after = some[-1].id
    found = page([job_view(job) for job in jobs], query.limit)
    if not is_backwards:
        return found
    turned = {"data": found.data[::-1], "first_id": found.last_id, "last_id": found.first_id}
    return found.model_copy(update=turned)


@router.get("/{id}", response_model=JobView, responses={304: {"description": "As `If-None-Match` says"}})
async def get_job(id: str, context: ContextOf, if_none_match: IfNoneMatch = None) -> Response:
    """One job. Its `ETag` is for `If-None-Match` here, and for `If-Match` when its settings are changed."""
    job = await context.store.jobs.get(id)
    return tagged(job_view(job), job.settings_version, if_none_match)


@router.get("/{id}/config")
async def get_config(id: str, context: ContextOf) -> ConfigView:
    """Its specification with every default spelled out."""
    job = await context.store.jobs.get(id)
    spec = readable_spec(job)
    warnings = ["it comes from another release, which this one cannot read"] if spec is None else spec_warnings(spec)
    return ConfigView(job_id=job.id, config=job.spec_data, warnings=warnings)


@router.post("/{id}/pause", responses=documented(409))
async def pause(id: str, context: ContextOf) -> JobView:
    """Ask a job to pause: it ends the step that it is in, and waits. Episodes that run go on to their end."""
    await context.store.jobs.set_desired_state(id, DesiredState.PAUSED)
    return job_view(await context.store.jobs.get(id))


@router.post("/{id}/resume", responses=documented(409))
async def resume(id: str, context: ContextOf) -> JobView:
    """Let a paused job go on."""
    await context.store.jobs.set_desired_state(id, DesiredState.RUNNING)
    return job_view(await context.store.jobs.get(id))


@router.post("/{id}/cancel", responses=documented(409))
async def cancel(id: str, query: Annotated[CancelQuery, Query()], context: ContextOf) -> JobView:
    """Ask for the end of a job. Its trainer brings it about; a job that nobody has taken yet ends at once. Ask again
    without `drain` for an end at once."""
    manner = CancelManner.of(drain=query.mode == "drain", checkpoint=query.checkpoint)
    await context.store.jobs.set_desired_state(id, DesiredState.CANCELLED, manner)
    return job_view(await context.store.jobs.get(id))


async def _plan(spec: JobSpec, context: ApiContext) -> PlanView:
    from services.api.submission import preview  # few submissions are dry runs
    from services.api.submission.prompt_check import look_at_prompts

    seen = await asyncio.to_thread(preview.look, spec)
    await look_at_prompts(context, spec, seen)
    alive = Counter(one.role for one in await context.presence.members() if one.is_alive)
    return PlanView(
        config=spec.model_dump(mode="json"),
        warnings=[*spec_warnings(spec), *seen.warnings],
        unchecked=seen.unchecked,
        estimate=estimate(spec),
        capacity={"num_engines": alive["engine"], "num_workers": alive["gateway" if spec.is_of_agents else "rollout"]},
    )
