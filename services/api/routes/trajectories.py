"""Trajectories of a user's own rollout code: into groups that the trainer has dispatched, and no others.

Rule: a pushed episode is taken, appended and given back by the calls that rollout workers use, under a token that lives
as long as the request. So it is fenced like theirs, and a worker that plays at the same time wins or loses whole
episodes, never halves. One bad item never rejects the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field

from gspo_core.codec import decode, encode
from gspo_core.types import EpisodeKey, Split
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused, documented
from services.api.http.routers import v1_router
from services.api.http.stored_specs import spec_of
from services.api.submission.trajectories import (
    MAX_ITEMS,
    PushedTrajectory,
    Reason,
    Rules,
    TrajectoryRefused,
    pieces,
    shared_steps,
    vocab_size_of,
)
from services.api.views.store_views import View
from services.state.jobs import JobRecord
from services.state.queue import Append, Conflict, EpisodeView, Fenced, Gap, LeasedEpisode, Stage

router = v1_router("trajectories", "/jobs/{id}")

MAX_TASKS = 2**31


class PushedTrajectories(BaseModel):
    """Episodes, or pieces of them, in the order in which they are to be taken."""

    model_config = ConfigDict(extra="forbid")

    trajectories: Annotated[list[PushedTrajectory], Field(min_length=1, max_length=MAX_ITEMS)]


class TakenView(View):
    """What became of one item."""

    index: int
    accepted: bool
    reason: Reason | None = None
    """Why it was not accepted."""
    message: str | None = None


class PushedView(View):
    """What became of each item, in order."""

    object: Literal["trajectories.pushed"] = "trajectories.pushed"
    num_accepted: int
    data: list[TakenView]


class NumTasks(BaseModel):
    model_config = ConfigDict(extra="forbid")

    train: Annotated[int, Field(ge=1, le=MAX_TASKS)]
    eval: Annotated[int, Field(ge=0, le=MAX_TASKS)] = 0


class Description(BaseModel):
    """An environment that is played elsewhere."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    num_tasks: NumTasks
    """Groups are about tasks from 0 up to this number, in an order that the job's seed decides."""


class DescribedView(View):
    object: Literal["job.environment.description"] = "job.environment.description"
    id: str
    description: dict[str, Any]
    """The one that holds: the first that was given."""


@router.post("/environments/{index}/description", responses=documented(413, 415))
async def describe_environment(id: str, index: int, given: Description, context: ContextOf) -> DescribedView:
    """Say how many tasks an environment has that is played outside, where no rollout worker can load it. The first
    description of an environment holds, whichever caller gave it."""
    job = await context.store.jobs.get(id)
    if not 0 <= index < len(job.spec_data.get("environments", ())):
        raise RequestRefused(404, "environment_not_found", f"the job has no environment {index}", param="index")
    held = await context.store.environments.describe(job.id, index, given.model_dump(mode="json"))
    return DescribedView(id=f"{job.id}/{index}", description=held)


@router.post("/trajectories", responses=documented(413, 415))
async def push_trajectories(id: str, given: PushedTrajectories, request: Request, context: ContextOf) -> PushedView:
    """Push finished or partial trajectories that were sampled outside, each into an episode of an open group. Every
    item is answered by itself; repeating a request is harmless, what is there already is a `duplicate`."""
    caller: Caller = request.scope["caller"]
    job = await context.store.jobs.get(id)
    if not job.status.is_served:
        answers = [_refused(n, "job_not_running", f"the job is {job.status}") for n in range(len(given.trajectories))]
        return PushedView(num_accepted=0, data=answers)
    rules = await _rules(context, job, caller)
    # Episodes of a process that died midway become free again.
    await context.bus.reap(job.id)
    worker = f"push-{uuid4().hex}"
    token = await context.bus.join(worker)
    answers, taken = [], dict[EpisodeKey, LeasedEpisode]()
    try:
        for number, item in enumerate(given.trajectories):
            try:
                await _push(context, job.id, worker, token, item, rules, taken)
                answers.append(TakenView(index=number, accepted=True))
            except TrajectoryRefused as refusal:
                answers.append(_refused(number, refusal.reason, str(refusal)))
            context.traffic.count_pushed(answers[-1].reason or "accepted")
    finally:
        await context.bus.hand_back(job.id, token, list(taken))
        await context.bus.leave(worker, token)
    return PushedView(num_accepted=sum(one.accepted for one in answers), data=answers)


async def _rules(context: ApiContext, job: JobRecord, caller: Caller) -> Rules:
    spec = spec_of(job)
    try:
        size = await asyncio.to_thread(vocab_size_of, Path(spec.model))
    except (OSError, ValueError) as error:
        message = f"the files of the job's model cannot be read here: {error}"
        raise RequestRefused(422, "validation_failed", message, param="model") from None
    steps = shared_steps(await context.store.versions.table(job.id))
    cap = int(job.settings.get("rollout.staleness_cap", spec.rollout.staleness_cap))
    return Rules(spec, size, max(steps.values(), default=0) - cap, steps, f"pushed:{caller.name}")


async def _push(
    context: ApiContext,
    job: str,
    worker: str,
    token: str,
    item: PushedTrajectory,
    rules: Rules,
    taken: dict[EpisodeKey, LeasedEpisode],
) -> None:
    """Raises TrajectoryRefused."""
    key = EpisodeKey(job, item.group, item.member)
    if not rules.steps:
        raise TrajectoryRefused("unknown_version", "the job has published no version yet")
    leases = await context.bus.take(job, worker, token, [key])
    if not leases:
        await _explain(context, job, item)
    lease = taken[key] = leases[0]
    if lease.split is not Split.TRAIN:
        raise TrajectoryRefused("not_open", f"group {item.group} is an evaluation")
    held = [decode(payload) for payload in await context.bus.read_episode(key)]
    made = await asyncio.to_thread(pieces, item, rules, held, key, lease.attempt, lease.environment)
    appends = [Append(key, lease.attempt, one.index, encode(one), one.is_final, one.version) for one in made]
    try:
        await context.bus.append(job, token, appends)
    except (Fenced, Gap, Conflict) as error:
        raise TrajectoryRefused("held", f"the episode has gone to another player in the meantime: {error}") from None


async def _explain(context: ApiContext, job: str, item: PushedTrajectory) -> None:
    """Raises TrajectoryRefused with the reason why an episode could not be taken."""
    groups = await context.bus.groups(job, after=item.group - 1, limit=1)
    episodes: Mapping[int, EpisodeView] = {}
    if groups and groups[0].group == item.group:
        episodes = {one.key.member: one for one in groups[0].episodes}
    found = episodes.get(item.member)
    if found is None:
        raise TrajectoryRefused("not_open", f"{item.group}/{item.member} is not an episode of an open group")
    if found.stage in (Stage.DONE, Stage.DEAD):
        raise TrajectoryRefused("duplicate", "this episode has ended")
    raise TrajectoryRefused("held", f"{found.worker or 'another player'} is playing this episode")


def _refused(number: int, reason: Reason, message: str) -> TakenView:
    return TakenView(index=number, accepted=False, reason=reason, message=message)
