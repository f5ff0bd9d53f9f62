"""What an environment shows of itself without training: its tools, some of its tasks, one episode.

Rule: everything that comes back is JSON of bounded size, whatever an author's code returns. It judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gspo_core.env import Environment, ParsedTurn, Timeouts, ToolCall
from gspo_core.messages import CallStatus
from gspo_core.testing.rehearsal import as_turn
from gspo_core.testing.watch import oracle_of
from gspo_core.types import Split

MAX_TEXT_CHARS = 20_000
MAX_TURNS = 64


def schema(environment: Environment) -> dict[str, Any]:
    """Its tools, limits and numbers of tasks."""
    described: dict[str, Any] = _plain(environment.describe())
    return described


async def tasks(environment: Environment, split: Split, first: int, count: int) -> dict[str, Any]:
    """Some tasks in order, and how many there are."""
    total = environment.num_tasks(split)
    found = [await environment.task(split, index) for index in range(first, min(first + count, total))]
    return {"total": total, "tasks": [_plain(dict(one)) for one in found]}


async def play(
    environment: Environment,
    timeouts: Timeouts,
    split: Split,
    index: int,
    turns: Sequence[Mapping[str, Any]] | None,
    seed: int,
) -> dict[str, Any]:
    """One episode with the given turns; None: those of its oracle. Raises ``EnvironmentFailed``, ``LookupError``."""
    task = await environment.task(split, index)
    given = _by_oracle(environment, task) if turns is None else [_turn(one) for one in turns[:MAX_TURNS]]
    session = environment.session(limits=timeouts, episode_id="try")
    shown: list[dict[str, Any]] = []
    stop = None
    try:
        start = await session.start(task, seed)
        shown += [{"from": "environment", "message": dict(message)} for message in start.messages]
        for turn in given:
            calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
            shown.append({"from": "policy", "text": turn.text, "calls": calls})
            observation = await session.act(turn)
            shown += [{"from": "environment", "message": dict(message)} for message in observation.messages]
            if observation.done:
                stop = str(observation.stop_reason)
                break
        reward, parts = await session.score()
    finally:
        await session.close()
    transcript: list[Any] = [_plain(one) for one in shown]
    return {"transcript": transcript, "stop_reason": stop, "reward": reward, "reward_parts": parts}


def _by_oracle(environment: Environment, task: Mapping[str, Any]) -> list[ParsedTurn]:
    oracle = oracle_of(environment)
    if oracle is None:
        raise LookupError(f"{environment.name} has no oracle: say what the policy does in `turns` (`--turns`)")
    return [as_turn(action) for action in oracle(**task)][:MAX_TURNS]


def _turn(given: Mapping[str, Any]) -> ParsedTurn:
    calls = tuple(
        ToolCall(call["name"], dict(call["arguments"]), CallStatus.OK, "", 0, 1) for call in given.get("calls", ())
    )
    return ParsedTurn(given.get("text", ""), calls)


def _plain(value: Any) -> Any:
    """As JSON can say it; what is too long to be shown becomes its beginning."""
    text = json.dumps(value, ensure_ascii=True, default=str, allow_nan=True)
    if len(text) > MAX_TEXT_CHARS:
        return {"cut": text[:MAX_TEXT_CHARS]}
    # Numbers that JSON has no word for are spelled out.
    return json.loads(text, parse_constant=str)
