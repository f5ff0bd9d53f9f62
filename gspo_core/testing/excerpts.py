"""Excerpts of an environment, without training: its tools, some of its tasks, one episode.

Rule: everything that comes back is JSON of bounded size, whatever an author's code returns. It judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypedDict

from gspo_core.answer_parts import TrialCall, TrialEntry
from gspo_core.env import Environment, ParsedTurn, Timeouts, ToolCall
from gspo_core.environment_records import FirstPrompt, Starts
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus
from gspo_core.testing.rehearsal import as_turn
from gspo_core.testing.watch import oracle_of
from gspo_core.types import Split

MAX_TEXT_CHARS = 20_000
MAX_TURNS = 64
# For all first prompts and their tools together: less than an answer may have.
MAX_STARTS_CHARS = 4 << 20


class TaskExcerpt(TypedDict):
    total: int
    tasks: list[JSON]


class PlayedExcerpt(TypedDict):
    transcript: list[JSON]
    stop_reason: str | None
    reward: float
    reward_parts: dict[str, float]


class CallScript(TypedDict):
    name: str
    arguments: dict[str, JSON]


class TurnScript(TypedDict, total=False):
    """One turn of the policy."""

    text: str
    calls: list[CallScript]


def schema(environment: Environment) -> JSON:
    """Its tools, limits and numbers of tasks."""
    return _plain(environment.describe())


async def tasks(environment: Environment, split: Split, first: int, count: int) -> TaskExcerpt:
    """Some tasks in order, and how many there are."""
    total = environment.num_tasks(split)
    found = [await environment.task(split, index) for index in range(first, min(first + count, total))]
    return {"total": total, "tasks": [_plain(dict(one)) for one in found]}


async def starts(environment: Environment, timeouts: Timeouts, count: int) -> Starts:
    """The first prompts of ``count`` training tasks, spread evenly; fewer if they are very long. Raises
    ``EnvironmentFailed``."""
    found: list[FirstPrompt] = []
    total, num_chars = environment.num_tasks(Split.TRAIN), 0
    for index in sorted({number * total // count for number in range(count)}):
        session = environment.session(limits=timeouts, episode_id="start")
        try:
            start = await session.start(await environment.task(Split.TRAIN, index), 0)
        finally:
            await session.close()
        num_chars += len(json.dumps([start.messages, start.tools], default=str))
        if num_chars > MAX_STARTS_CHARS:
            break
        found.append({"task": index, "messages": start.messages, "tools": start.tools})
    return {"starts": found, "limits": environment.limits}


async def play(
    environment: Environment,
    timeouts: Timeouts,
    split: Split,
    index: int,
    turns: Sequence[TurnScript] | None,
    seed: int,
) -> PlayedExcerpt:
    """One episode with the given turns; None: those of its oracle. Raises ``EnvironmentFailed``, ``LookupError``."""
    task = await environment.task(split, index)
    given = _by_oracle(environment, task) if turns is None else [_turn(one) for one in turns[:MAX_TURNS]]
    session = environment.session(limits=timeouts, episode_id="try")
    shown: list[TrialEntry] = []
    stop, paid = None, 0.0
    try:
        start = await session.start(task, seed)
        shown += [{"from": "environment", "message": message} for message in start.messages]
        for turn in given:
            calls: list[TrialCall] = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
            shown.append({"from": "policy", "text": turn.text, "calls": calls})
            observation = await session.act(turn)
            shown += [{"from": "environment", "message": message} for message in observation.messages]
            paid += observation.reward or 0.0
            if observation.done:
                stop = str(observation.stop_reason)
                break
        reward, parts = await session.score()
    finally:
        await session.close()
    return {
        "transcript": [_plain(one) for one in shown],
        "stop_reason": stop,
        "reward": reward + paid,
        "reward_parts": parts,
    }


def _by_oracle(environment: Environment, task: Mapping[str, JSON]) -> list[ParsedTurn]:
    oracle = oracle_of(environment)
    if oracle is None:
        raise LookupError(f"{environment.name} has no oracle: give the policy's turns in `turns` (`--turns`)")
    return [as_turn(action) for action in oracle(**task)][:MAX_TURNS]


def _turn(given: TurnScript) -> ParsedTurn:
    calls = tuple(
        ToolCall(call["name"], dict(call["arguments"]), CallStatus.OK, "", 0, 1) for call in given.get("calls", ())
    )
    return ParsedTurn(given.get("text", ""), calls)


def _plain(value: object) -> JSON:
    """As JSON can say it; what is too long to be shown becomes its beginning."""
    text = json.dumps(value, ensure_ascii=True, default=str, allow_nan=True)
    if len(text) > MAX_TEXT_CHARS:
        return {"cut": text[:MAX_TEXT_CHARS]}
    # Numbers that JSON has no word for are spelled out.
    plain: JSON = json.loads(text, parse_constant=str)
    return plain
