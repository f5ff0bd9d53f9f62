"""Has a rollout worker try the environments of a job: load one that this process does not find, and of a job that is
only looked at measure the prompts.

Rule: this process runs no environment and reads no model; a worker does, in a process apart. An environment that no
worker can load refuses the job; other findings are warnings, and what no worker could try stays unchecked.
"""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from gspo_core.answer_parts import NOT_LOADED
from gspo_core.spec import EnvironmentSpec, JobSpec
from services.api.http.context import ApiContext
from services.api.http.errors import RequestRefused
from services.api.submission.preview import Visible, problem_of_class
from services.state.process_requests import NoAnswer, NoWorkerThere, TooManyRequests, WorkerRequestFailed

# A person waits; an examination of theirs may hold a worker up for longer.
ASK_S = 20.0
LOAD_S = 5.0
# More are taken to be like these.
MOST_ASKED = 16


async def look_at_prompts(context: ApiContext, spec: JobSpec, found: Visible) -> None:
    """Adds to ``found``."""
    if not any(one.role == "rollout" and one.is_alive for one in await context.presence.members()):
        return
    if spec.is_of_agents:
        return  # what an agent asks first is known when it asks
    answers = await asyncio.gather(*(_answer(context, spec, place) for place in range(len(spec.environments))))
    for place, answer in enumerate(answers):
        if answer is not None:
            param = f"environments[{place}]"
            found.unchecked = [one for one in found.unchecked if not one.startswith(f"{param}.ref: ")]
            found.warnings += [f"{param}: {answer}"] if answer else []


async def _answer(context: ApiContext, spec: JobSpec, place: int) -> str | None:
    """The problem, empty if there is none; None if no worker could tell."""
    try:
        return await _problem(context, spec, place)
    except (NoAnswer, NoWorkerThere, TooManyRequests):
        return None
    except WorkerRequestFailed as error:
        if str(error).startswith(NOT_LOADED):
            why = str(error).removeprefix(NOT_LOADED)
            if await _nobody_loads(context, spec.environments[place]):
                raise _refused(place, why) from error
            return f"a rollout worker cannot load it: {why[:500]}"
        return f"a rollout worker could not measure its prompts: {str(error)[:500]}"


async def check_environments(context: ApiContext, spec: JobSpec) -> None:
    """Raises RequestRefused where neither this process nor a rollout worker finds one: a job that cannot begin would
    hold a trainer until that was clear."""
    for place, entry in enumerate(spec.environments):
        if entry.agent is not None or ":" not in entry.ref:
            continue
        problem = await asyncio.to_thread(problem_of_class, entry.ref)
        if problem is None or not any(
            one.role == "rollout" and one.is_alive for one in await context.presence.members()
        ):
            continue
        said = await _why_not_loaded(context, entry)
        if said and await _nobody_loads(context, entry):
            raise _refused(place, f"{problem}, and a rollout worker says: {said}")


async def _why_not_loaded(context: ApiContext, entry: EnvironmentSpec, worker: str = "") -> str:
    """Why any worker, or the named one, cannot load it; empty if it can, or no worker could tell."""
    order = {"do": "schema", "environment": entry.ref, "config": dict(entry.config)}
    try:
        await context.worker_requests.ask(order, LOAD_S, worker=worker)
    except (NoAnswer, NoWorkerThere, TooManyRequests):
        return ""
    except WorkerRequestFailed as error:
        text = str(error)
        return text.removeprefix(NOT_LOADED) if text.startswith(NOT_LOADED) else ""
    return ""


async def _nobody_loads(context: ApiContext, entry: EnvironmentSpec) -> bool:
    """Whether each worker says so, where one did: not all need have the same files."""
    workers = [one.id for one in await context.presence.members() if one.role == "rollout" and one.is_alive]
    return all(await asyncio.gather(*(_why_not_loaded(context, entry, one) for one in workers[:MOST_ASKED])))


def _refused(place: int, why: str) -> RequestRefused:
    return RequestRefused(422, "environment_invalid", why[:1000], param=f"environments[{place}].ref")


async def _problem(context: ApiContext, spec: JobSpec, place: int) -> str:
    """What speaks against the longest prompt, if anything. Raises what ``ask`` raises."""
    entry = spec.environments[place]
    order = {"do": "prompts", "environment": entry.ref, "config": dict(entry.config), "model": spec.model}
    said = await context.worker_requests.ask({**order, "chat": spec.chat.model_dump(mode="json")}, ASK_S)
    try:
        bound = spec.episode_limits(place, said["limits"]).max_context_tokens
    except ValidationError as error:
        return f"the limits that its author asks for: {error}"
    whose, models = "limits.max_context_tokens", int(said["model_tokens"])
    if models <= bound:
        whose, bound = "the model's context", models
    if int(said["tokens"]) < bound:
        return ""
    return f"the prompt of task {said['task']} has {said['tokens']:,} tokens; {whose} is {bound:,}"
