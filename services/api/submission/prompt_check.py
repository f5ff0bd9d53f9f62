"""Has a rollout worker measure the prompts of a job that is only looked at.

Rule: this process runs no environment and reads no model; a worker plays the starts of a few tasks in a process apart.
What it finds is a warning, and what nobody could measure stays unchecked.
"""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from gspo_core.spec import JobSpec
from services.api.http.context import ApiContext
from services.api.submission.preview import Visible
from services.state.worker_requests import NoAnswer, NoWorkerThere, TooManyRequests, WorkerRequestFailed

# A person waits; an examination of theirs may hold a worker up for longer.
ASK_S = 20.0


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
    """What is wrong, empty if nothing is; None if nobody could tell."""
    try:
        return await _problem(context, spec, place)
    except (NoAnswer, NoWorkerThere, TooManyRequests):
        return None
    except WorkerRequestFailed as error:
        return f"a rollout worker could not measure its prompts: {str(error)[:500]}"


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
