"""Jobs: submit, look at, list, cancel."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Annotated, Literal

from fastapi import Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gspo_core.spec import JobSpec, spec_warnings
from services.api.http import audit, listing
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import FINAL, RequestRefused, documented
from services.api.http.etags import IfNoneMatch, tagged
from services.api.http.routers import v1_router
from services.api.http.stored_specs import has_model_in, readable_spec, spec_of
from services.api.submission import submit as submitting
from services.api.submission.environment_refs import pin
from services.api.views.store_views import ConfigView, JobView, Page, PlannedJobView, PlanView, job_view, page
from services.state.jobs import CancelManner, DesiredState, JobInUse, JobRecord, JobStatus, new_job_id

router = v1_router("jobs", "/jobs")

# Readers of JSON, and functions in Redis, know greater numbers no longer exactly.
MOST_STEPS = 2**53
IdempotencyKey = Annotated[str | None, Header(max_length=255, pattern=r"^[\x21-\x7e]+$")]


class SubmittedSpec(JobSpec):
    """The specification of a job, as its user writes it."""

    # Built with the routes: only then does the framework silence warnings about its own use of fields.
    model_config = ConfigDict(defer_build=False)


class SubmitQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    dry_run: bool = False
    """Check and estimate; create nothing."""
    gpus: Annotated[str | None, Field(max_length=32)] = None
    """With `dry_run`: also plan the learner's memory on these, such as `8xH100` or `8x96GiB`."""


class JobListQuery(listing.Labelled):
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
    parent: str | None = None
    """Only jobs that were forked from this one, or are trained on its episodes."""


class JobQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    gpus: Annotated[str | None, Field(max_length=32)] = None
    """Also plan the learner's memory on these, such as `8xH100` or `8x96GiB`."""


class CancelQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    mode: Literal["now", "drain"] = "now"
    """`drain` starts nothing new, and plays and trains what is under way, as far as it fills steps."""
    checkpoint: bool = False
    """Write a checkpoint at the end; with `now` the step that it is in is taken first."""


class ResumeQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    from_step: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = None
    """For a job that is over: go on from the weights after this step; what lies beyond it is left. Left out: from where
    it ended."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """For a job that is over: how many steps it takes in all from now on. The schedule of its learning rate stays."""
    horizon: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """For a job that is over: where the schedule of its learning rate ends from now on."""


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
        plan = await _plan(await _pinned(spec, caller, context), context, query.gpus)
        return Response(plan.model_dump_json(), media_type="application/json")
    fresh_id = new_job_id(time.time())
    job = await submitting.submit(context, spec, caller, key=idempotency_key, job_id=fresh_id)
    return submitted(job, response, is_new=job.id == fresh_id)


@router.get("")
async def list_jobs(query: Annotated[JobListQuery, Query()], request: Request, context: ContextOf) -> Page[JobView]:
    """Jobs by age; only admins see those of others. `metadata[NAME]=VALUE` selects by metadata."""
    caller: Caller = request.scope["caller"]
    wanted = listing.asked(request.query_params.multi_items())
    if query.after is not None and query.before is not None:
        raise RequestRefused(400, "invalid_cursor", "after and before are mutually exclusive", param="before")
    is_backwards = query.before is not None
    after = query.before if is_backwards else query.after
    order = query.order if not is_backwards else "desc" if query.order == "asc" else "asc"
    jobs: list[JobRecord] = []
    while len(jobs) <= query.limit:
        some = await context.store.jobs.page(101, after, order=order)
        seen = [job for job in some if query.status in (None, job.status) and caller.sees(job.owner)]
        seen = [job for job in seen if query.parent in (None, parent_of(job))]
        jobs += [job for job in seen if listing.fits(job, wanted)]
        if len(some) < 101:
            break
        after = some[-1].id
    found = page([job_view(job) for job in jobs], query.limit)
    if not is_backwards:
        return found
    turned = {"data": found.data[::-1], "first_id": found.last_id, "last_id": found.first_id}
    return found.model_copy(update=turned)


@router.get("/{id}", response_model=PlannedJobView, responses={304: {"description": "As `If-None-Match` says"}})
async def get_job(
    id: str, query: Annotated[JobQuery, Query()], context: ContextOf, if_none_match: IfNoneMatch = None
) -> Response:
    """One job. Its `ETag` is for `If-None-Match` here, and for `If-Match` when its settings are changed."""
    job = await context.store.jobs.get(id)
    view: JobView = job_view(job)
    if query.gpus is not None:
        from services.api.submission import preview  # few who look at a job ask for a plan

        memory = await asyncio.to_thread(preview.plan_memory, spec_of(job), query.gpus)
        view = PlannedJobView(**dict(view), memory=memory)
    return tagged(view, job.settings_version, if_none_match)


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
    return job_view(await wish(context, id, DesiredState.PAUSED))


@router.post("/{id}/resume", responses=documented(409))
async def resume(id: str, query: Annotated[ResumeQuery, Query()], context: ContextOf) -> JobView:
    """Let a paused job go on; or one that is over, as itself: from where it ended or `from_step`, for `steps` in
    all."""
    from services.api.submission import resuming  # few jobs that are over go on

    job = await context.store.jobs.get(id)
    wanted = resuming.ResumeRequest(query.from_step, query.steps, query.horizon)
    if job.status.is_terminal:
        reopened = await resuming.resume(context, job, wanted)
        audit.changed("job", id, *({"status": str(one.status), "settings": one.settings} for one in (job, reopened)))
        return job_view(reopened)
    if not wanted.is_plain:
        raise RequestRefused(
            409, "invalid_transition", f"{id} is {job.status}: only a job that is over goes back or on"
        )
    return job_view(await wish(context, id, DesiredState.RUNNING))


@router.delete("/{id}", status_code=204, responses=documented(409))
async def remove(id: str, context: ContextOf) -> None:
    """Remove a job that is over, with all that it has made: checkpoints, weights, episodes, metrics. A job that another
    one was forked from, is trained on the episodes of, or has its model from, stays until that one is removed."""
    job = await context.store.jobs.get(id)
    if not job.status.is_terminal:
        raise RequestRefused(409, "job_not_over", f"the job is {job.status}: cancel it first", headers=FINAL)
    directory = await asyncio.to_thread(context.history.job_dir(job.id).path.resolve)

    def made_from(other: JobRecord) -> str | None:
        return job.id if has_model_in(other, directory) else parent_of(other)

    try:
        await context.store.jobs.remove(job.id, made_from=made_from)
    except JobInUse as error:
        if error.passes:
            raise RequestRefused(409, "in_progress", str(error)) from error
        raise
    audit.changed("job", id, {"status": str(job.status)}, {"status": "removed"})


@router.post("/{id}/cancel", responses=documented(409))
async def cancel(id: str, query: Annotated[CancelQuery, Query()], context: ContextOf) -> JobView:
    """Ask for the end of a job. Its trainer brings it about; a job that no trainer has taken yet ends at once. Ask
    again without `drain` for an end at once."""
    manner = CancelManner.of(drain=query.mode == "drain", checkpoint=query.checkpoint)
    return job_view(await wish(context, id, DesiredState.CANCELLED, manner))


async def wish(
    context: ApiContext, id: str, desired: DesiredState, manner: CancelManner = CancelManner.NOW
) -> JobRecord:
    """Write the wish down, in the audit too; the job as it is then."""
    before = await context.store.jobs.get(id)
    await context.store.jobs.set_desired_state(id, desired, manner)
    after = await context.store.jobs.get(id)
    wishes = ({"desired_state": one.desired_state, "cancel_manner": one.cancel_manner} for one in (before, after))
    audit.changed("job", id, *wishes)
    return after


def submitted(job: JobRecord, response: Response, *, is_new: bool) -> JobView:
    """The answer to a submission of `job`; a new job is noted in the audit."""
    if is_new:
        note_new(job)
    else:
        response.headers["Idempotent-Replayed"] = "true"
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job_view(job)


def note_new(job: JobRecord) -> None:
    """In the audit."""
    beginning = {name: job.spec_data[name] for name in ("parent", "recorded") if job.spec_data.get(name)}
    audit.changed("job", job.id, new={"owner": job.owner, "model": job.spec_data.get("model"), **beginning})


def parent_of(job: JobRecord) -> str | None:
    """The job that it was forked from, or whose episodes it is trained on."""
    parent = job.spec_data.get("parent") or job.spec_data.get("recorded")
    return None if parent is None else str(parent["job"])


async def _pinned(spec: JobSpec, caller: Caller, context: ApiContext) -> JobSpec:
    """The specification as it would be accepted. Raises RequestRefused, JobNotFound."""
    submitting.require_reasonable(spec)
    spec = await asyncio.to_thread(submitting.pin_model, spec, context.hub)
    await submitting.check_model(context, spec, caller)
    spec = await asyncio.to_thread(pin, spec, context.registry, caller, context.networks)
    if spec.parent is not None:
        from services.api.submission import forking  # few submissions are forks

        await forking.planned(context, spec, caller, {})
    if spec.recorded is not None:
        from services.api.submission import recording  # as few are trained on another's episodes

        spec = await recording.planned(context, spec, caller)
    return spec.as_submitted()


async def _plan(spec: JobSpec, context: ApiContext, gpus: str | None) -> PlanView:
    from services.api.submission import preview  # few submissions are dry runs
    from services.api.submission.estimate import estimate
    from services.api.submission.prompt_check import look_at_prompts

    memory = None if gpus is None else await asyncio.to_thread(preview.plan_memory, spec, gpus)
    seen = await asyncio.to_thread(preview.look, spec)
    await look_at_prompts(context, spec, seen)
    alive = Counter(one.role for one in await context.presence.members() if one.is_alive)
    return PlanView(
        config=spec.model_dump(mode="json"),
        warnings=[*spec_warnings(spec), *seen.warnings],
        unchecked=seen.unchecked,
        estimate=await asyncio.to_thread(estimate, spec),
        capacity={"num_engines": alive["engine"], "num_workers": alive["gateway" if spec.is_of_agents else "rollout"]},
        memory=memory,
    )
