"""Episodes of a world without a model, to be imitated: calls that fit its tools, and what its oracle would do, if any.

Rule: training tasks only; the same seed plays the same. What is played is bounded in time, since tools may be slow, and
an episode in which the world failed is not kept.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gspo_core.env import Environment, EnvironmentFailed, Timeouts
from gspo_core.json_value import JSON
from gspo_core.messages import Message, ToolSchema
from gspo_core.testing.random_calls import Action, random_actions
from gspo_core.testing.rehearsal import as_turn
from gspo_core.testing.watch import oracle_of
from gspo_core.types import Split

ENDING = "done"
"""What an assistant says who calls nothing more."""
BY_ORACLE = 0.5
"""The share of episodes that follow the oracle, where there is one."""
ASTRAY = 0.25
"""How often such an episode does something else for a turn."""
MAX_FAILURES = 16


@dataclass(frozen=True)
class PlayedEpisode:
    prompt: Sequence[Message]
    tools: Sequence[ToolSchema]
    said: Sequence[Message]
    """What follows: the assistant's turns and what it was answered."""
    reward: float


async def play(
    environment: Environment,
    timeouts: Timeouts,
    *,
    seed: int,
    number: int,
    max_turns: int,
    seconds: float,
    tell: Callable[[int], None] = lambda _: None,
) -> list[PlayedEpisode]:
    """At most ``number`` episodes, in about ``seconds``. Raises ``EnvironmentFailed`` where hardly any is well."""
    generator, began = random.Random(seed), time.monotonic()
    found: list[PlayedEpisode] = []
    num_failures = 0
    while len(found) < number and (time.monotonic() - began < seconds or not found):
        task = await environment.task(Split.TRAIN, generator.randrange(environment.num_tasks(Split.TRAIN)))
        try:
            found.append(await _episode(environment, timeouts, task, generator, max_turns))
        except EnvironmentFailed:
            num_failures += 1
            if num_failures >= MAX_FAILURES and num_failures > len(found):
                raise
        tell(len(found))
    return found


async def _episode(
    environment: Environment, timeouts: Timeouts, task: Mapping[str, JSON], generator: random.Random, max_turns: int
) -> PlayedEpisode:
    session = environment.session(limits=timeouts, episode_id="starter")
    said: list[Message] = []
    paid = 0.0
    try:
        start = await session.start(task, generator.randrange(2**31))
        is_done = False
        for action in _actions(environment, task, start.tools, generator, max_turns):
            said.append(_message(action))
            observation = await session.act(as_turn(action))
            said += observation.messages
            paid += observation.reward or 0.0
            is_done = observation.done
            if is_done:
                break
        if not is_done:
            said.append({"role": "assistant", "content": ENDING})
        reward, _ = await session.score()
    finally:
        await session.close()
    while said and said[-1]["role"] != "assistant":  # the last answers have no reader
        said.pop()
    return PlayedEpisode(start.messages, start.tools, said, reward + paid)


def _actions(
    environment: Environment,
    task: Mapping[str, JSON],
    tools: Sequence[ToolSchema],
    generator: random.Random,
    max_turns: int,
) -> Sequence[Action]:
    """Words alone are how an episode ends in most worlds, so where there are tools nothing else is said."""
    at_random = random_actions(tools, task, max_turns, seed=generator.randrange(2**31))
    oracle = oracle_of(environment)
    if oracle is None or generator.random() >= BY_ORACLE:
        return at_random[: generator.randint(1, max_turns)]
    return [
        other if generator.random() < ASTRAY else right
        for right, other in zip(list(oracle(**task))[:max_turns], at_random, strict=False)
    ]


def _message(action: Action) -> Message:
    if isinstance(action, str):
        return {"role": "assistant", "content": action}
    name, arguments = action
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": dict(arguments)}}],
    }


def chosen(episodes: Sequence[PlayedEpisode], count: int, generator: random.Random) -> list[PlayedEpisode]:
    """Most of them from those that did better than others at the same task, so that what is good is found again."""
    better = better_ones(episodes)
    return [generator.choice(better if place % 4 else episodes) for place in range(count)]


def better_ones(episodes: Sequence[PlayedEpisode]) -> Sequence[PlayedEpisode]:
    """Those that earned the most of their task's, where not all earned the same; of equal ones the shorter half."""
    by_task: dict[str, list[PlayedEpisode]] = {}
    for one in episodes:
        by_task.setdefault(json.dumps(list(one.prompt)), []).append(one)
    found: list[PlayedEpisode] = []
    for alike in by_task.values():
        most = max(one.reward for one in alike)
        if most > min(one.reward for one in alike):
            best = sorted((one for one in alike if one.reward == most), key=lambda one: len(one.said))
            found += best[: -(-len(best) // 2)]
    return found or episodes
