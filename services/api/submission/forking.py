"""A new job from a step of an older one: its specification, and the files that it gets from its parent.

Rule: only a caller who sees the parent can fork it. The child gets all that it needs before it is accepted, so it never
waits for files that its parent may remove.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from operator import attrgetter

from pydantic import ValidationError

from gspo_core.json_value import JSON
from gspo_core.live_settings import tuned
from gspo_core.log.changes import ImpossibleChange, Without, changed_spec
from gspo_core.problems import Problem, problems
from gspo_core.spec import JobSpec, ParentSpec
from services.api.http.access import Caller
from services.api.http.context import ApiContext
from services.api.http.errors import FINAL, RequestRefused, invalid
from services.api.http.stored_specs import spec_of
from services.files.origin import ForkOrigin, PastError, bring, plan
from services.files.recording import NoSuchEpisode, Rewards
from services.state.store import JobNotFound, JobRecord

# What a fork takes over, by the keys that say which shape that has.
_INHERITED: Mapping[str, str] = {"model": "weights", "learner.lora": "weights", "optimizer.moments": "moments"}


def child_of(parent: JobRecord, at: ParentSpec, name: str | None, changes: Mapping[str, JSON]) -> JobSpec:
    """The parent's specification with its live settings and these changes. Raises RequestRefused."""
    spec = tuned(spec_of(parent), parent.settings)
    try:
        begun = changed_spec(spec.model_copy(update={"recorded": None}), changes)
    except ImpossibleChange as error:
        raise invalid([Problem("validation_failed", ("set",), str(error))]) from error
    data = begun.model_dump(mode="json") | {"parent": at.model_dump(mode="json"), "name": name or begun.name}
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise invalid(problems(error, JobSpec, data)) from error


async def planned(context: ApiContext, spec: JobSpec, caller: Caller, rewards: Rewards) -> ForkOrigin:
    """What it takes to begin ``spec``, which has a parent. Raises RequestRefused, JobNotFound."""
    _require_own_rewards(_at(spec), rewards)
    await _parent(context, spec, caller)
    return await require_kept(context, _at(spec), caller, rewards)


async def require_kept(context: ApiContext, at: ParentSpec, caller: Caller, rewards: Rewards) -> ForkOrigin:
    """What it takes to get to that step of that job. Raises RequestRefused, JobNotFound."""
    await _seen(context, at, caller)
    theirs, without = context.history.job_dir(at.job), Without.parse(at.without)
    try:
        return await asyncio.to_thread(
            plan, theirs, at.step, at.last, without, same_batches=at.same_batches, rewards=rewards
        )
    except ImpossibleChange as error:
        raise invalid([Problem("validation_failed", ("without",), str(error))]) from error
    except NoSuchEpisode as error:
        raise invalid([Problem("validation_failed", ("rewards",), str(error))]) from error
    except PastError as error:
        raise RequestRefused(409, "step_not_kept", str(error), param="step", headers=FINAL) from error


async def bring_parent(context: ApiContext, spec: JobSpec, caller: Caller, job_id: str, rewards: Rewards) -> None:
    """Bring a job what it needs of its parent, unless it has that. Raises RequestRefused, JobNotFound."""
    at = _at(spec)
    _require_own_rewards(at, rewards)
    parent = await _parent(context, spec, caller)
    theirs, ours = (context.history.job_dir(one) for one in (parent.id, job_id))
    if ours.origin.path.is_dir():  # an earlier request of the same key got as far
        return
    try:
        await asyncio.to_thread(bring, theirs, ours, at, rewards)
    except ImpossibleChange as error:
        raise invalid([Problem("validation_failed", ("parent", "without"), str(error))]) from error
    except NoSuchEpisode as error:
        raise invalid([Problem("validation_failed", ("rewards",), str(error))]) from error
    except PastError as error:
        raise RequestRefused(409, "step_not_kept", str(error), param="parent.step", headers=FINAL) from error


def _require_own_rewards(at: ParentSpec, rewards: Rewards) -> None:
    """Rewards come with the request: a specification names only their digest, which the service sets."""
    if (at.rewards is not None) != bool(rewards):
        message = "rewards come with POST /v1/jobs/{id}/fork"
        raise invalid([Problem("validation_failed", ("parent", "rewards"), message)])


async def _seen(context: ApiContext, at: ParentSpec, caller: Caller) -> JobRecord:
    parent = await context.store.jobs.get(at.job)
    if not caller.sees(parent.owner):
        raise JobNotFound(at.job)
    return parent


async def _parent(context: ApiContext, spec: JobSpec, caller: Caller) -> JobRecord:
    parent = await _seen(context, _at(spec), caller)
    theirs = spec_of(parent)
    for key, what in _INHERITED.items():
        ours_of, theirs_of = (attrgetter(key)(one) for one in (spec, theirs))
        is_there = what == "weights" or _at(spec).step > 0  # moments are, once a step was trained
        if is_there and ours_of != theirs_of:
            message = f"{key}: a fork goes on with the {what} of its parent, which has {theirs_of}"
            raise invalid([Problem("validation_failed", tuple(key.split(".")), message)])
    return parent


def _at(spec: JobSpec) -> ParentSpec:
    assert spec.parent is not None, "the caller has looked"
    return spec.parent
