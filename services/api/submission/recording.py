"""Jobs that are trained on episodes of other jobs: their specification, and the episodes that they get.

Rule: only a caller who sees a job can train on its episodes. The new job gets all of them before it is accepted, with
their steps; rewards come with the request, and the job holds their digest. Only an existing episode that may have a
reward gets another.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import ValidationError

from gspo_core.codec import SegmentRejected, decode
from gspo_core.invariants import InvalidValue
from gspo_core.json_value import JSON
from gspo_core.live_settings import tuned
from gspo_core.log.changes import ImpossibleChange, changed_spec
from gspo_core.log.recording import FIRST_OF_TRACES, recording
from gspo_core.problems import Problem, problems
from gspo_core.replay.past import Past, PastError
from gspo_core.spec import JobSpec, RecordedSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from services.api.http.access import Caller
from services.api.http.context import ApiContext
from services.api.http.errors import FINAL, RequestRefused, invalid
from services.api.http.stored_specs import spec_of
from services.files.recording import (
    NoSuchEpisode,
    Rewards,
    bring_recording,
    in_batches,
    recorded_steps,
    require_known,
    write_recording,
)
from services.state.store import JobNotFound, JobRecord
from services.state.talks import Entry, Talks

# Digits of 2**53, the greatest number of a group; Python refuses to read some thousands.
MOST_DIGITS = 16
Traces = Sequence[Mapping[str, float]]
"""Groups of conversations, each with its reward."""


def digest_of(rewards: Mapping[str, float] | Traces) -> str | None:
    """None: no rewards."""
    plain = dict(rewards) if isinstance(rewards, Mapping) else [dict(one) for one in rewards]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest() if rewards else None


def by_member(rewards: Mapping[str, float]) -> Rewards:
    """Raises RequestRefused."""
    found: dict[tuple[int, int], float] = {}
    for name, reward in rewards.items():
        group, _, member = name.partition("/")
        if not all(one.isdecimal() and len(one) <= MOST_DIGITS for one in (group, member)):
            raise _invalid("rewards", f"{name[:80]} names no episode: write GROUP/MEMBER")
        found[int(group), int(member)] = reward
    return found


def require_compared(spec: JobSpec, rewards: str | None) -> None:
    """Rewards that come with the request have no parts. ``rewards``: their digest. Raises RequestRefused."""
    if rewards is not None and spec.objective.advantage.part_weights is not None:
        raise _invalid(
            "rewards",
            "with objective.advantage.part_weights only parts of rewards are compared, and those that are given have "
            "none: set objective.advantage.part_weights to null",
        )


def retrained(
    source: JobRecord, at: RecordedSpec, num_steps: int, name: str | None, changes: Mapping[str, JSON]
) -> JobSpec:
    """The specification of the other job with its live settings and these changes, on its episodes alone.

    Raises RequestRefused.
    """
    spec = tuned(spec_of(source), source.settings)
    try:
        bare = spec.model_copy(update={"evaluation": None, "parent": None, "recorded": None})
        begun = changed_spec(bare, {"steps": num_steps, **changes})
    except ImpossibleChange as error:
        raise invalid([Problem("validation_failed", ("set",), str(error))]) from error
    data = begun.model_dump(mode="json") | {"recorded": at.model_dump(mode="json"), "name": name or begun.name}
    if begun.steps > num_steps:
        raise _too_many(begun.steps, num_steps)
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise invalid(problems(error, JobSpec, data)) from error


async def source_of(context: ApiContext, at: RecordedSpec, caller: Caller) -> JobRecord:
    """Raises JobNotFound."""
    source = await context.store.jobs.get(at.job)
    if not caller.sees(source.owner):
        raise JobNotFound(at.job)
    return source


async def steps_of(context: ApiContext, at: RecordedSpec) -> tuple[int, ...]:
    """Raises RequestRefused."""
    try:
        return await asyncio.to_thread(recorded_steps, context.history.job_dir(at.job), at.first, at.last)
    except PastError as error:
        raise RequestRefused(409, "step_not_kept", str(error), param="recorded", headers=FINAL) from error


async def completed(context: ApiContext, spec: JobSpec, caller: Caller, held: JobRecord | None) -> JobSpec:
    """A submitted job with the steps that its recording makes; what it leaves out is as in ``held``, if it was made
    before.

    Raises RequestRefused, JobNotFound.
    """
    at = spec.recorded
    if at is None or at.traces:
        return spec
    if held is not None:
        return _filled_in_as(spec, at, spec_of(held))
    await source_of(context, at, caller)
    steps = await steps_of(context, at)
    if "steps" in spec.model_fields_set and spec.steps > len(steps):
        raise _too_many(spec.steps, len(steps))
    num_steps = spec.steps if "steps" in spec.model_fields_set else len(steps)
    return _with(spec, at.model_copy(update={"first": steps[0], "last": steps[-1]}), num_steps)


def _filled_in_as(spec: JobSpec, at: RecordedSpec, theirs: JobSpec) -> JobSpec:
    """Fills in only what was left out, so that a different request under the same key is told from a repetition."""
    if theirs.recorded is None:
        return spec
    first, last = at.first or theirs.recorded.first, at.last or theirs.recorded.last
    num_steps = spec.steps if "steps" in spec.model_fields_set else theirs.steps
    return _with(spec, at.model_copy(update={"first": first, "last": last}), num_steps)


def as_asked(spec: JobSpec, first: int | None, last: int | None, *, has_steps: bool) -> JobSpec:
    """As asked for, without what was filled in since: a repetition may come when the other job has gone further."""
    if spec.recorded is None or spec.recorded.traces:
        return spec
    at = spec.recorded.model_copy(update={"first": first, "last": last})
    said = spec.model_fields_set if has_steps else spec.model_fields_set - {"steps"}
    return JobSpec.model_construct(set(said), **dict(spec) | {"recorded": at})


def _require_own_rewards(at: RecordedSpec, rewards: Rewards) -> None:
    """Rewards and traces come with the request: a specification names only their digest, which the service sets."""
    if at.traces or (at.rewards is not None) != bool(rewards):
        raise _invalid("recorded", "rewards and traces come with POST /v1/jobs/{id}/retrain")


def _with(spec: JobSpec, at: RecordedSpec, num_steps: int) -> JobSpec:
    data = spec.model_dump(mode="json") | {"recorded": at.model_dump(mode="json"), "steps": num_steps}
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise invalid(problems(error, JobSpec, data)) from error


async def planned(context: ApiContext, spec: JobSpec, caller: Caller) -> JobSpec:
    """A submitted job with the steps that its recording makes, as it would be accepted. Raises RequestRefused,
    JobNotFound."""
    if spec.recorded is not None:
        _require_own_rewards(spec.recorded, {})
    return await completed(context, spec, caller, None)


async def bring_recorded(context: ApiContext, spec: JobSpec, caller: Caller, job_id: str, rewards: Rewards) -> None:
    """Bring a job the episodes that it is trained on, unless it has them. Raises RequestRefused, JobNotFound."""
    at, ours = spec.recorded, context.history.job_dir(job_id)
    if at is None or ours.recorded.path.is_dir():
        return
    _require_own_rewards(at, rewards)
    await source_of(context, at, caller)
    steps = await steps_of(context, at)
    try:
        await asyncio.to_thread(bring_recording, context.history.job_dir(at.job), ours, steps, rewards)
    except (PastError, FileNotFoundError) as error:
        raise RequestRefused(409, "step_not_kept", str(error), param="recorded", headers=FINAL) from error
    except NoSuchEpisode as error:
        raise _invalid("rewards", str(error)) from error


async def require_episodes(context: ApiContext, at: RecordedSpec, rewards: Rewards) -> None:
    """Those that are given a reward are in the steps that are taken. Raises RequestRefused."""
    steps = await steps_of(context, at)
    try:
        await asyncio.to_thread(require_known, rewards, Past(context.history.job_dir(at.job).path), steps)
    except PastError as error:
        raise RequestRefused(409, "step_not_kept", str(error), param="recorded", headers=FINAL) from error
    except NoSuchEpisode as error:
        raise _invalid("rewards", str(error)) from error


async def groups_of(context: ApiContext, source: JobRecord, traces: Traces) -> list[Group]:
    """Conversations as groups. Raises RequestRefused where one is not kept, or cannot be trained."""
    entries = await _entries(context, source.id)
    return [_group(source.id, number, members, entries) for number, members in enumerate(traces, FIRST_OF_TRACES)]


async def bring_traces(context: ApiContext, spec: JobSpec, job_id: str, source: JobRecord, traces: Traces) -> None:
    """Bring a job conversations as groups. Raises RequestRefused."""
    batches = list(in_batches(await groups_of(context, source, traces), spec.groups_per_step))
    ours, theirs = (context.history.job_dir(one) for one in (job_id, source.id))

    def write() -> None:
        write_recording(ours, theirs.accepted.read_bytes(), recording(batches, {}))

    if not ours.recorded.path.is_dir():
        await asyncio.to_thread(write)


def num_trace_steps(groups_per_step: int, traces: Traces) -> int:
    return -(-len(traces) // groups_per_step)


async def _entries(context: ApiContext, job: str) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    talks, after = Talks(context.functions), "-"
    while entries := await talks.traffic(job, after):
        after = entries[-1].id
        for entry in entries:
            found.setdefault(str(entry.trace), []).append(entry)
    return found


def _group(job: str, number: int, members: Mapping[str, float], entries: Mapping[str, Sequence[Entry]]) -> Group:
    episodes = [
        _episode(EpisodeKey(job, number, place), trace, reward, entries.get(trace, ()))
        for place, (trace, reward) in enumerate(members.items())
    ]
    return Group(job, number, Split.TRAIN, 0, len(episodes), tuple(episodes))


def _episode(key: EpisodeKey, trace: str, reward: float, entries: Sequence[Entry]) -> Trajectory:
    if not entries:
        raise _invalid("traces", f"no conversation {trace} is kept")
    if any(entry.payload.startswith(b"{") for entry in entries):
        raise _invalid("traces", f"conversation {trace} was redacted: its text is not what was sampled")
    try:
        said = [replace(decode(entry.payload), key=key) for entry in entries]
        return Trajectory((*said, _end(said[-1], reward)))
    except (SegmentRejected, InvalidValue) as error:
        raise _invalid("traces", f"conversation {trace} is not whole: {error}") from error


def _end(last: Segment, reward: float) -> Segment:
    """The segment that carries the outcome; nothing was sampled in it."""
    return replace(
        last,
        index=last.index + 1,
        token_ids=last.token_ids[:0],
        action_mask=last.action_mask[:0],
        behavior_logprobs=last.behavior_logprobs[:0],
        outcome=Outcome(StopReason.COMPLETED, reward),
        spent=None,
        asked=None,
        user="",
    )


def _too_many(steps: int, num_batches: int) -> RequestRefused:
    return _invalid(
        "steps", f"{steps} are more than the {num_batches} batches that are recorded; the job ends with them"
    )


def _invalid(key: str, message: str) -> RequestRefused:
    return invalid([Problem("validation_failed", (key,), message)])
