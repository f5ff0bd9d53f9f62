"""The checks before an environment may train anything: each check is a finding with its reason.

Rule: a check fails only for what would falsify training or stop it (a leak between episodes, a hang, a reward that is
none, a tool that cannot be called); what is merely unusual is a warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import statistics
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gspo_core.env import CallStatus, Environment, EnvironmentFailed, ParsedTurn, Timeouts, ToolCall
from gspo_core.env.tools import Tool
from gspo_core.environment_records import Measured
from gspo_core.json_value import JSON
from gspo_core.messages import ToolSchema
from gspo_core.testing.calls import Answered, calls_check
from gspo_core.testing.prompts import PromptMeter, prompt_check
from gspo_core.testing.random_calls import Action, random_actions
from gspo_core.testing.rehearsal import (
    Rehearsal,
    RehearsalStage,
    Transcript,
    rehearse,
    seed_everything,
)
from gspo_core.testing.report import Check, Status
from gspo_core.types import Split, StopReason

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP
Oracle = Callable[..., Sequence[Action]]
"""``oracle(**task)``: a perfect policy's turns, words or (tool, arguments), in order."""

# A leak shows in the first episodes or not at all; each of them costs an author's time.
NUM_TASKS, NUM_TURNS, NUM_TOGETHER = 3, 5, 4
_COMPARED_TASKS = 500
_ENDING_S = 5.0
"""The thread of a session ends after its last call, on a busy machine later."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The environment under examination, and the means."""

    environment: Environment
    timeouts: Timeouts
    oracle: Oracle | None = None
    meter: PromptMeter | None = None
    stage: RehearsalStage = field(default_factory=RehearsalStage)

    async def rehearse(self, task: Mapping[str, JSON], actions: Sequence[Action], *, chance: int = 0) -> Transcript:
        return await rehearse(self.environment, task, actions, self.timeouts, chance=chance, stage=self.stage)

    def rehearsal(self) -> Rehearsal:
        return Rehearsal(self.environment, self.timeouts, self.stage)


@dataclass(frozen=True, slots=True)
class _Played:
    task: Mapping[str, JSON]
    actions: Sequence[Action]
    transcript: Transcript


async def examine(subject: Subject) -> AsyncIterator[Check]:
    """All checks in order; the later ones are left out where episodes cannot be played at all."""
    stage = subject.stage
    stage.act = "looking at its tools and tasks"
    yield _tools(subject.environment)
    yield await _tasks(subject.environment)
    state = shared_state(subject.environment)
    num_threads, timers = threading.active_count(), _running_timers()
    try:
        played = []
        for number in range(NUM_TASKS):
            stage.act = f"playing episode {number + 1} of {NUM_TASKS} with random calls"
            played.append(await _play(subject, number))
    except EnvironmentFailed as failure:
        yield _failed(failure)
        return
    for check in (_reset(played), *_content(played), _timeouts(subject, played)):
        yield check
        if check.status is FAIL:
            return
    changed = [name for name, value in shared_state(subject.environment).items() if state.get(name) != value]
    try:
        stage.act = "playing an episode twice more, with other generators"
        chance = await _chance(subject, played[0])
        stage.act = f"playing the {NUM_TASKS} episodes again"
        isolation = await _isolation(subject, played, changed, chance)
        yield isolation
        if isolation.status is FAIL:
            yield Check("together", SKIP, "cannot be compared: episodes differ even when played one after the other")
        else:
            stage.act = f"playing {NUM_TOGETHER} episodes at the same time"
            yield await _together(subject, played[0], chance)
        stage.act = "playing what its oracle does, and nothing"
        by_oracle = await _by_oracle(subject, played[0].task)
        yield calls_check(_answered(played), None if by_oracle is None else _answered([by_oracle]))
        yield await _reward(subject, played, by_oracle)
        stage.act = "making wrong calls"
        yield await _errors(subject, played[0].task)
        stage.act = "interrupting an episode"
        yield await _snapshot(subject, played[0])
    except EnvironmentFailed as failure:
        yield _failed(failure)
        return
    stage.act = "closing its episodes"
    yield await _close(played, num_threads)
    for check in (*_blocking(stage), *_timers(timers), _latency(played)):
        yield check
    stage.act = "measuring its prompts"
    yield await _prompt(subject)


# --- what can be seen without an episode ----------------------------------------------------------------------------


def _tools(environment: Environment) -> Check:
    tools: Sequence[ToolSchema] = environment.tools
    named = getattr(environment, "tools_by_name", {})
    wrong = [
        f"{name} takes only **kwargs, so the policy is told of no arguments: name them"
        for name, tool in named.items()
        if getattr(tool, "open_ended", False) and not tool.parameters
    ]
    for tool in tools:
        function = tool["function"]
        if function["name"] == "oracle":
            wrong.append("oracle is offered to the policy as a tool: make it a static method")
            continue
        if not function.get("description"):
            wrong.append(f"{function['name']} has no docstring")
        for name, schema in function["parameters"]["properties"].items():
            place = f"{function['name']}({name})"
            if not {"type", "enum", "anyOf", "oneOf", "$ref"} & schema.keys():
                wrong.append(f"{place} has no type hint that becomes a JSON type")
            if not schema.get("description"):
                wrong.append(f"{place} is not described under 'Args:'")
    raw = list(_raw(named))
    if wrong:
        return Check("tools", FAIL, "; ".join([*wrong, *raw]), {"problems": [*wrong, *raw]})
    if raw:
        return Check("tools", WARN, "; ".join(raw), {"problems": raw})
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        return Check("tools", WARN, "no public method, so the policy can only write text")
    return Check("tools", PASS, ", ".join(names), {"tools": names})


def _raw(tools: Mapping[str, Tool]) -> Iterator[str]:
    """Parameters that tools get as plain JSON although their hints name classes."""
    for name, tool in tools.items():
        for parameter in tool.parameters:
            if parameter.unread and parameter.schema.keys() - {"description"}:
                classes = ", ".join(parameter.unread)
                yield f"{name}({parameter.name}) gets plain JSON in place of {classes}, which cannot be read from JSON"


async def _tasks(environment: Environment) -> Check:
    counts = {str(split): environment.num_tasks(split) for split in Split}
    splits = {}
    for split in Split:
        number = min(environment.num_tasks(split), _COMPARED_TASKS)
        try:
            splits[split] = [repr(sorted((await environment.task(split, i)).items())) for i in range(number)]
        except EnvironmentFailed as failure:
            return Check("tasks", FAIL, failure.reason)
    shared = set(splits[Split.TRAIN]) & set(splits[Split.EVAL])
    if shared:
        return Check("tasks", WARN, f"{len(shared)} held-out tasks are also training tasks", counts)
    if not counts["eval"]:
        return Check("tasks", WARN, f"{counts['train']} tasks, none held out: nothing can be measured", counts)
    return Check("tasks", PASS, f"{counts['train']} to train, {counts['eval']} held out", counts)


# --- episodes -------------------------------------------------------------------------------------------------------


async def _play(subject: Subject, number: int) -> _Played:
    environment = subject.environment
    index = number * environment.num_tasks(Split.TRAIN) // NUM_TASKS
    task = await environment.task(Split.TRAIN, index)
    actions = random_actions(environment.tools, task, NUM_TURNS, seed=number)
    return _Played(task, actions, await subject.rehearse(task, actions))


def _failed(failure: EnvironmentFailed) -> Check:
    return Check({"score": "reward"}.get(failure.phase, failure.phase), FAIL, failure.reason)


def _reset(played: Sequence[_Played]) -> Check:
    if any('"content": ""' in one.transcript.first and '"role": "user"' in one.transcript.first for one in played):
        return Check("reset", WARN, "the first user message is empty: reset returns nothing and the task has no prompt")
    num_tasks = len({repr(one.task) for one in played})
    return Check("reset", PASS, f"{num_tasks} {'task begins' if num_tasks == 1 else 'tasks begin'}")


def _content(played: Sequence[_Played]) -> Iterator[Check]:
    """Nothing where all is text, as it nearly always is."""
    found = sorted({part for one in played for part in one.transcript.other_parts})
    if found:
        message = f"models read text only here, but other content is shown: {'; '.join(found)}"
        yield Check("content", FAIL, message, {"found": found})


def _timeouts(subject: Subject, played: Sequence[_Played]) -> Check:
    limit = f"timed out after {subject.timeouts.step_timeout_s:g}s"
    for one in played:
        slow = next((n for n, answer in enumerate(one.transcript.answers) if limit in answer), None)
        if one.transcript.stop is StopReason.TOOL_TIMEOUT:
            slow = len(one.transcript.answers) - 1
        if slow is not None:
            message = f"{one.actions[slow]!r} {limit}: it hangs, or needs a longer step_timeout_s in `limits`"
            return Check("timeouts", FAIL, message)
    return Check("timeouts", PASS, f"every answer came within {subject.timeouts.step_timeout_s:g}s")


async def _isolation(subject: Subject, played: Sequence[_Played], changed: Sequence[str], chance: str | None) -> Check:
    """The same episode again, now that others have been played, must be the same."""
    environment = subject.environment
    where = f"; what changed between episodes: {', '.join(changed)}" if changed else ""
    data = {"changed": list(changed)}
    for one in played:
        again = await subject.rehearse(one.task, one.actions)
        if not again.same_as(one.transcript):
            difference = one.transcript.difference(again)
            message = f"an episode changes when others were played before it (or with the clock): {difference}{where}"
            return Check("isolation", FAIL, message, data)
    if chance is not None:
        status, word = (FAIL, "declared replayable, but ") if environment.replayable else (WARN, "")
        return Check("isolation", status, f"{word}randomness does not come from `seed`: {chance}", data)
    if changed:
        return Check("isolation", WARN, f"episodes are alike, but they write to {', '.join(changed)}", data)
    return Check("isolation", PASS, "the same seed and calls give the same episode, whatever was played before")


async def _chance(subject: Subject, one: _Played) -> str | None:
    """How the episode differs if the generators that a program shares stand elsewhere."""
    alike = await subject.rehearse(one.task, one.actions)
    other = await subject.rehearse(one.task, one.actions, chance=1)
    return None if other.same_as(alike) else alike.difference(other)


async def _together(subject: Subject, one: _Played, chance: str | None) -> Check:
    """Several sessions act by turns; none may notice the others."""
    if chance is not None:
        return Check("together", SKIP, "cannot be compared: chance does not come from `seed`")
    seed_everything()
    rehearsals = [subject.rehearsal() for _ in range(NUM_TOGETHER)]
    for rehearsal in rehearsals:
        await rehearsal.start(one.task)
    for action in one.actions:
        await asyncio.gather(*(rehearsal.act(action) for rehearsal in rehearsals))
    transcripts = [await rehearsal.end() for rehearsal in rehearsals]
    for transcript in transcripts:
        if not transcript.same_as(one.transcript):
            difference = one.transcript.difference(transcript)
            return Check("together", FAIL, f"episodes that run at the same time affect each other: {difference}")
    return Check("together", PASS, f"{NUM_TOGETHER} episodes at the same time do not affect each other")


def _answered(played: Sequence[_Played]) -> list[Answered]:
    """The calls that were made, with their answers; an episode may end before its last action."""
    return [
        Answered(action[0], json.dumps(action[1], sort_keys=True, default=str), answer)
        for one in played
        for action, answer in zip(one.actions, one.transcript.contents, strict=False)
        if not isinstance(action, str)
    ]


async def _by_oracle(subject: Subject, task: Mapping[str, JSON]) -> _Played | None:
    if subject.oracle is None:
        return None
    actions = list(subject.oracle(**task))
    return _Played(task, actions, await subject.rehearse(task, actions))


async def _reward(subject: Subject, played: Sequence[_Played], by_oracle: _Played | None) -> Check:
    environment = subject.environment
    task = played[0].task
    rewards = [one.transcript.reward for one in played]
    floor = (await subject.rehearse(task, [""])).reward
    data: dict[str, Measured] = {"random": rewards, "nothing": floor}
    best = None if by_oracle is None else by_oracle.transcript.reward
    if best is not None:
        data["oracle"] = best
    low, high = environment.reward_range or (-math.inf, math.inf)
    outside = [value for value in (*rewards, floor, *([] if best is None else [best])) if not low <= value <= high]
    if outside:
        return Check("reward", FAIL, f"{outside[0]} is outside the declared reward_range ({low}, {high})", data)
    if best is not None and best <= floor:
        return Check("reward", FAIL, f"the oracle gets {best}, doing nothing gets {floor}", data)
    shown = f"random calls {min(rewards):g} to {max(rewards):g}, doing nothing {floor:g}"
    shown += "" if best is None else f", oracle {best:g}"
    if best is None and played[0].transcript.answers and floor > max(rewards):
        advice = "a policy may learn to do nothing; an oracle would show what acting is worth"
        return Check("reward", WARN, f"{shown}: no random episode is worth as much as doing nothing, so {advice}", data)
    if environment.reward_range is None:
        return Check("reward", WARN, f"{shown}; no reward_range, so a broken episode is worth 0", data)
    return Check("reward", PASS, shown, data)


async def _errors(subject: Subject, task: Mapping[str, JSON]) -> Check:
    """Whatever a policy writes is answered."""
    attempts = [ToolCall("no_such_tool", {}, CallStatus.UNKNOWN_TOOL, "", 0, 1)]
    attempts.append(ToolCall(None, {}, CallStatus.INVALID_JSON, "{", 0, 1))
    for tool in subject.environment.tools:
        name = tool["function"]["name"]
        unfit: tuple[JSON, ...] = ({"no_such": 1}, [1], None)
        attempts += [ToolCall(name, given, CallStatus.OK, "", 0, 1) for given in unfit]
    rehearsal = subject.rehearsal()
    await rehearsal.start(task)
    observation = await rehearsal.session.act(ParsedTurn("", tuple(attempts)))
    await rehearsal.end(score=False)
    answers = [str(message["content"]) for message in observation.messages]
    if any("Traceback" in answer for answer in answers):
        return Check("errors", FAIL, "an answer to a wrong call contains a traceback, which a policy would learn from")
    return Check("errors", PASS, f"{len(answers)} wrong calls are answered, and none ends the episode")


async def _snapshot(subject: Subject, one: _Played) -> Check:
    environment = subject.environment
    if not environment.has_snapshot:
        how = "by replay" if environment.replayable else "from their beginning (neither snapshot nor replayable)"
        return Check("resume", PASS if environment.replayable else WARN, f"interrupted episodes resume {how}")
    seed_everything()
    half = len(one.actions) // 2
    first = subject.rehearsal()
    await first.start(one.task)
    for action in one.actions[:half]:
        await first.act(action)
    state = await first.session.snapshot()
    await first.end(score=False)
    if state is None or first.transcript.stop is not None:
        return Check("resume", SKIP, "the episode ended before a snapshot could be tried")
    second = subject.rehearsal()
    await second.session.restore(one.task, 0, state)
    second.transcript.first, second.transcript.answers = first.transcript.first, list(first.transcript.answers)
    for action in one.actions[half:]:
        await second.act(action)
    restored = await second.end()
    if not restored.same_as(one.transcript):
        difference = one.transcript.difference(restored)
        return Check("resume", FAIL, f"an episode restored from its snapshot continues differently: {difference}")
    return Check("resume", PASS, f"a snapshot of {len(state)} bytes restores an episode")


async def _close(played: Sequence[_Played], num_threads: int) -> Check:
    failure = next((one.transcript.close_failure for one in played if one.transcript.close_failure), None)
    if failure is not None:
        return Check("close", FAIL, f"close() fails: {failure}")
    left = await _threads_left(num_threads)
    if left > NUM_TOGETHER:
        return Check("close", WARN, f"{left} threads are still there {_ENDING_S:g} s after every episode was closed")
    return Check("close", PASS, "every episode was closed")


async def _threads_left(num_before: int) -> int:
    """More than there were before any episode; those that are only ending are waited for."""
    patience = asyncio.get_running_loop().time() + _ENDING_S
    while (left := threading.active_count() - num_before) > NUM_TOGETHER:
        if asyncio.get_running_loop().time() > patience:
            break
        await asyncio.sleep(0.01)
    return left


def _blocking(stage: RehearsalStage) -> Iterator[Check]:
    """Nothing where nothing blocks, as in most worlds."""
    if stage.blocked is not None:
        phase, seconds = stage.blocked
        message = (
            f"an async member holds the event loop for {seconds:.1f} s ({phase}), and with it every other episode of "
            "its process: await what takes time, or write a plain `def`, which gets a thread"
        )
        yield Check("blocking", WARN, message, {"phase": phase, "seconds": seconds})


def _running_timers() -> set[str]:
    kinds = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
    return {name for name in kinds if signal.getitimer(getattr(signal, name))[0] > 0}


def _timers(before: Collection[str]) -> Iterator[Check]:
    """Nothing where none runs that did not run ``before``. Its signal ends the process, with all of its episodes."""
    if running := sorted(_running_timers() - set(before)):
        message = (
            f"it leaves a timer running (signal.setitimer or signal.alarm: {', '.join(running)}), whose signal ends "
            "the process and all episodes in it"
        )
        yield Check("timers", FAIL, message, {"running": running})


def _latency(played: Sequence[_Played]) -> Check:
    data = {}
    for phase in ("reset", "step", "score"):
        given = sorted(value for one in played for value in one.transcript.durations_s.get(phase, ()))
        if given:
            data[phase] = {"p50_ms": 1e3 * statistics.median(given), "max_ms": 1e3 * given[-1]}
    text = ", ".join(f"{phase} {values['p50_ms']:.2f} ms" for phase, values in data.items())
    return Check("latency", PASS, f"p50: {text}", data)


async def _prompt(subject: Subject) -> Check:
    if subject.meter is None:
        return Check("prompt", SKIP, "no model given, so the length of the prompts is not known")
    lengths = []
    for number in range(min(subject.environment.num_tasks(Split.TRAIN), 50)):
        rehearsal = subject.rehearsal()
        task = await subject.environment.task(Split.TRAIN, number)
        start = await rehearsal.session.start(task, 0)
        await rehearsal.end(score=False)
        try:
            lengths.append(subject.meter.length(start.messages, start.tools))
        except ValueError as error:  # the model's template has no words for it
            return Check("prompt", FAIL, f"task {number}: {error}")
    return prompt_check(subject.meter, lengths, subject.environment.limits)


def shared_state(environment: Environment) -> dict[str, str]:
    """The state that episodes of a class share: attributes of the class and globals of its module, as text."""
    found: dict[str, str] = {}
    several = getattr(environment, "environments", {"": environment})
    for one in several.values():
        cls = getattr(one, "cls", None)
        for base in [] if cls is None else cls.__mro__[:-1]:
            found |= {f"{base.__qualname__}.{name}": value for name, value in _values(vars(base))}
        module = None if cls is None else _module_of(cls)
        found |= dict(_values(vars(module) if module is not None else {}))
    return found


_CODE = (types.FunctionType, types.ModuleType, type, staticmethod, classmethod, property)


def _values(members: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in list(members.items()):
        if not name.startswith("__") and not isinstance(value, _CODE):
            with contextlib.suppress(Exception):  # an author's repr
                yield name, repr(value)


def _module_of(cls: type) -> types.ModuleType | None:
    return sys.modules.get(cls.__module__)
