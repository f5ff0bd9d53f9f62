"""New jobs from the past of another: forks from any step that is kept, and jobs that are trained on its episodes."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

from gspo_core.invariants import MOST_SIZE
from gspo_core.job_spec import MOST_WITHOUT, LeftOut
from gspo_core.spec import JobSpec, ParentSpec, RecordedSpec
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused, documented
from services.api.http.routers import v1_router
from services.api.routes.jobs import MOST_STEPS, IdempotencyKey, submitted
from services.api.submission import submit as submitting
from services.api.views.store_views import JobView, View
from services.state.jobs import JobRecord, new_job_id

# More do not fit into a request.
MAX_REWARDS = 1 << 17
router = v1_router("jobs", "/jobs")


Reward = Annotated[FiniteFloat, Field(ge=-MOST_SIZE, le=MOST_SIZE)]
Rewarded = Annotated[dict[str, Reward], Field(min_length=1, max_length=1024)]


class ForkRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    step: Annotated[int, Field(ge=0, le=MOST_STEPS)] | None = None
    """The step to begin after. Left out: the newest one."""
    set: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings that differ from the parent's, by key: `{"optimizer.lr": 1e-6}`."""
    same_batches: bool = False
    """Train it first on the batches that the parent was trained on after this step, as far as they are kept."""
    last: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """With `same_batches`: the step whose batch is the last. Left out: as far as they are kept."""
    without: Annotated[list[LeftOut], Field(max_length=MOST_WITHOUT)] = Field(default_factory=list)
    """With `same_batches`: what these batches lack, as in a replay: groups (`130`), episodes (`130/4`), parts of the
    reward by their name."""
    rewards: Annotated[dict[str, Reward], Field(max_length=MAX_REWARDS)] = Field(default_factory=dict)
    """With `same_batches`: rewards in place of those recorded, by episode: `{"349/2": 1.0}` (`gspo rescore --to`)."""
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Its label. Left out: the parent's."""


class ForkQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    dry_run: bool = False
    """Say what it takes; create nothing."""


class ForkPlanView(View):
    """What a fork would take; nothing was created."""

    object: Literal["fork.plan"] = "fork.plan"
    parent: str
    step: int
    from_checkpoint: int | None
    """Step of the checkpoint that it begins with; null: the base model."""
    replayed_steps: int
    """Steps that are trained again before it begins."""
    same_batches: int
    """Batches of the parent that it would be fed."""


@router.post(
    "/{id}/fork",
    status_code=201,
    response_model=JobView,
    responses={
        200: {"model": ForkPlanView, "description": "What it would take (`dry_run=true`)"},
        **documented(409, 413, 415),
    },
)
async def fork(
    id: str,
    wanted: ForkRequest,
    query: Annotated[ForkQuery, Query()],
    request: Request,
    response: Response,
    context: ContextOf,
    idempotency_key: IdempotencyKey = None,
) -> JobView | Response:
    """Begin a new job with the weights, moments, schedule, data and random state after a step of this one."""
    from services.api.submission import forking, recording

    named = [name for name in ("rewards", "last", "without") if getattr(wanted, name)]
    if named and not wanted.same_batches:
        message = f"{named[0]}: of what it is fed; set same_batches"
        raise RequestRefused(422, "validation_failed", message, param=named[0])
    rewards = recording.by_member(wanted.rewards)
    caller: Caller = request.scope["caller"]
    parent = await context.store.jobs.get(id)
    step = await _step(context, caller, parent, idempotency_key) if wanted.step is None else wanted.step
    digest = recording.digest_of(wanted.rewards)
    at = ParentSpec(
        job=id,
        step=step,
        same_batches=wanted.same_batches,
        last=wanted.last,
        without=tuple(wanted.without),
        rewards=digest,
    )
    try:
        spec = forking.child_of(parent, at, wanted.name, wanted.set)
    except RequestRefused:
        # Else what is said of its settings is beside the point.
        await forking.require_kept(context, at, caller, rewards)
        raise
    recording.require_compared(spec, digest)
    if query.dry_run:
        await submitting.checked(context, spec, caller)
        found = await forking.planned(context, spec, caller, rewards)
        plan = ForkPlanView(
            parent=id,
            step=at.step,
            from_checkpoint=None if found.start is None else found.start.step,
            replayed_steps=found.num_replayed,
            same_batches=len(found.ahead) if at.same_batches else 0,
        )
        return Response(plan.model_dump_json(), media_type="application/json")
    fresh_id = new_job_id(time.time())

    async def bring(spec: JobSpec, job_id: str) -> None:
        await forking.bring_parent(context, spec, caller, job_id, rewards)

    job = await submitting.submit(context, spec, caller, key=idempotency_key, job_id=fresh_id, bring=bring)
    return submitted(job, response, is_new=job.id == fresh_id)


async def _step(context: ApiContext, caller: Caller, parent: JobRecord, key: str | None) -> int:
    """The newest, also of a repeated request: the one that was the newest then, where that made its job."""
    made = await submitting.made_under(context, caller, key)
    at = None if made is None else made.spec_data.get("parent")
    return _newest(parent) if at is None or at["job"] != parent.id else int(at["step"])


def _newest(job: JobRecord) -> int:
    """A fork that has not begun stands where it was forked."""
    parent = job.spec_data.get("parent")
    return max(job.step, 0 if parent is None else int(parent["step"]))


class RetrainRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    first: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """The step of this job whose batch is the first. Left out: the oldest that is kept."""
    last: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """The step whose batch is the last. Left out: the newest."""
    rewards: Annotated[dict[str, Reward], Field(max_length=MAX_REWARDS)] = Field(default_factory=dict)
    """Rewards in place of those recorded, by episode: `{"349/2": 1.0}` (`gspo rescore --to`)."""
    traces: Annotated[list[Rewarded], Field(max_length=MAX_REWARDS)] = Field(default_factory=list)
    """In place of episodes: conversations that keys had with this job, by id, each with its reward; those that are
    compared with each other stand in one group."""
    set: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings that differ from this job's, by key: `{"optimizer.lr": 1e-6}`."""
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Its label. Left out: this job's."""

    @model_validator(mode="after")
    def _check(self) -> RetrainRequest:
        if self.traces and (self.rewards or self.first is not None or self.last is not None):
            raise ValueError("traces: stand in place of episodes; leave out first, last and rewards")
        return self


class RetrainQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    dry_run: bool = False
    """Say what it takes; create nothing."""


class RetrainPlanView(View):
    """What the job would be trained on; nothing was created."""

    object: Literal["retrain.plan"] = "retrain.plan"
    job: str
    first: int | None
    last: int | None
    steps: int
    """One for each batch."""
    rewards: int
    """How many episodes are given another."""


@router.post(
    "/{id}/retrain",
    status_code=201,
    response_model=JobView,
    responses={
        200: {"model": RetrainPlanView, "description": "What it would be trained on (`dry_run=true`)"},
        **documented(409, 413, 415),
    },
)
async def retrain(
    id: str,
    wanted: RetrainRequest,
    query: Annotated[RetrainQuery, Query()],
    request: Request,
    response: Response,
    context: ContextOf,
    idempotency_key: IdempotencyKey = None,
) -> JobView | Response:
    """Train a new job, from its model on, on the recorded episodes of this one; nothing is played for it."""
    from services.api.submission import recording

    caller: Caller = request.scope["caller"]
    source = await context.store.jobs.get(id)
    at, num_steps = await _wanted(context, source, wanted)
    spec = recording.retrained(source, at, num_steps, wanted.name, wanted.set)
    recording.require_compared(spec, at.rewards)
    if query.dry_run:
        await submitting.checked(context, spec, caller)
        if at.traces:
            await recording.groups_of(context, source, wanted.traces)
        else:
            await recording.require_episodes(context, at, recording.by_member(wanted.rewards))
        plan = RetrainPlanView(job=id, first=at.first, last=at.last, steps=num_steps, rewards=len(wanted.rewards))
        return Response(plan.model_dump_json(), media_type="application/json")
    fresh_id = new_job_id(time.time())
    spec = recording.as_asked(spec, wanted.first, wanted.last, has_steps="steps" in wanted.set)

    async def bring(spec: JobSpec, job_id: str) -> None:
        if at.traces:
            await recording.bring_traces(context, spec, job_id, source, wanted.traces)
        else:
            await recording.bring_recorded(context, spec, caller, job_id, recording.by_member(wanted.rewards))

    job = await submitting.submit(context, spec, caller, key=idempotency_key, job_id=fresh_id, bring=bring)
    return submitted(job, response, is_new=job.id == fresh_id)


async def _wanted(context: ApiContext, source: JobRecord, wanted: RetrainRequest) -> tuple[RecordedSpec, int]:
    """What it is trained on, and in how many steps."""
    from services.api.submission import recording

    if wanted.traces:
        size = wanted.set.get("groups_per_step", source.spec_data.get("groups_per_step", 1))
        at = RecordedSpec(job=source.id, traces=True, rewards=recording.digest_of(wanted.traces))
        return at, recording.num_trace_steps(size if isinstance(size, int) and size > 0 else 1, wanted.traces)
    at = RecordedSpec(job=source.id, first=wanted.first, last=wanted.last, rewards=recording.digest_of(wanted.rewards))
    steps = await recording.steps_of(context, at)
    return at.model_copy(update={"first": steps[0], "last": steps[-1]}), len(steps)
