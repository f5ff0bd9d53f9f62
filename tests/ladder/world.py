"""Any environment, made larger: a longer prompt, more tools, more turns, one long observation.

Rule: the world inside is played as it is; nothing of it is replaced, only added to. When it is over before the turns
are, it is left alone and the episode goes on with filler. It runs in hosts, so it needs Python and this tree only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from gspo_core.env import EnvironmentFailed, load_environment
from gspo_core.environment_contract import Environment, Observation, PhaseLimits, Session, Start, description
from gspo_core.environment_records import EnvironmentDescription
from gspo_core.json_value import JSON
from gspo_core.messages import Message, ParsedTurn, ToolCall, ToolSchema
from gspo_core.types import Split, StopReason

WORD = " so"
"""One token in Qwen's vocabulary, also when it is repeated."""
EXTRA = "extra_"
GO_ON = "Go on."


def extra_tool(number: int) -> ToolSchema:
    """A tool that every world can be given; its answer says nothing."""
    return {
        "type": "function",
        "function": {
            "name": f"{EXTRA}{number}",
            "description": f"Tool {number}.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "any text"}}},
        },
    }


def with_extra(tools: Sequence[ToolSchema], num_tools: int) -> list[ToolSchema]:
    return [*tools, *(extra_tool(number) for number in range(num_tools - len(tools)))]


@dataclass(frozen=True)
class Sizes:
    prompt_words: int = 0
    """Added to the last message of the prompt."""
    observation_words: int = 0
    """Added to the first answer of an episode."""
    num_turns: int = 1
    num_tools: int = 0
    """Filled up to."""


class Sized:
    """Made by ``load_environment`` with a configuration: see ``as_environment``."""

    @staticmethod
    def as_environment(
        name: str,
        *,
        inner: str,
        config: Mapping[str, JSON] | None = None,
        prompt_words: int = 0,
        observation_words: int = 0,
        num_turns: int = 1,
        num_tools: int = 0,
    ) -> SizedEnvironment:
        """``inner`` and ``config`` name the world inside."""
        sizes = Sizes(prompt_words, observation_words, num_turns, num_tools)
        return SizedEnvironment(name, load_environment(inner, config), sizes)


class SizedEnvironment:
    has_snapshot = False
    replayable = False
    reward_range = None

    def __init__(self, name: str, inner: Environment, sizes: Sizes) -> None:
        self.name = name
        self._inner = inner
        self._sizes = sizes

    @property
    def limits(self) -> Mapping[str, JSON]:
        return self._inner.limits

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return with_extra(self._inner.tools, self._sizes.num_tools)

    def num_tasks(self, split: Split) -> int:
        return self._inner.num_tasks(split)

    async def task(self, split: Split, index: int) -> Mapping[str, JSON]:
        return await self._inner.task(split, index)

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> Session:
        return SizedSession(self._inner.session(limits=limits, episode_id=episode_id), self._sizes)

    def describe(self) -> EnvironmentDescription:
        return description(self)


class SizedSession:
    def __init__(self, inner: Session, sizes: Sizes) -> None:
        self._inner = inner
        self._sizes = sizes
        self._num_turns = 0
        self._inner_is_over = False
        self._generator = random.Random()

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        begun = await self._inner.start(task, seed)
        self._generator = random.Random(f"{seed} {id(self)}")
        messages = _longer(begun.messages, self._sizes.prompt_words)
        return Start(messages, with_extra(begun.tools, self._sizes.num_tools))

    async def act(self, turn: ParsedTurn) -> Observation:
        self._num_turns += 1
        messages: list[Message] = []
        reward: float | None = None
        for is_extra, calls in groupby(turn.calls, key=_is_extra):
            part = ParsedTurn(turn.text, tuple(calls))
            observed = _filler(part) if is_extra else await self._act_inside(part)
            messages += observed.messages
            reward = observed.reward if reward is None else reward + (observed.reward or 0.0)
        if not turn.calls:
            observed = await self._act_inside(turn)
            messages, reward = list(observed.messages), observed.reward
        if self._num_turns == 1:
            messages = _longer(messages, self._sizes.observation_words)
        if self._num_turns == self._sizes.num_turns:
            return Observation(messages, done=True, stop_reason=StopReason.COMPLETED, reward=reward)
        return Observation(messages, reward=reward)

    async def _act_inside(self, turn: ParsedTurn) -> Observation:
        if self._inner_is_over:
            return _filler(turn)
        observed = await self._inner.act(turn)
        self._inner_is_over = observed.done
        return observed if observed.messages else replace(observed, messages=_filler(turn).messages)

    async def score(self) -> tuple[float, dict[str, float]]:
        """What the world inside says, and chance: members of a group have to differ for anything to be learned."""
        reward, parts = await self._inner.score()
        return reward + self._generator.random(), parts

    async def snapshot(self) -> bytes | None:
        return None

    async def restore(self, task: Mapping[str, JSON], seed: int, state: bytes) -> None:
        raise EnvironmentFailed("restore", "there are no snapshots")

    async def close(self) -> None:
        await self._inner.close()

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._inner.metrics

    @property
    def close_failure(self) -> str | None:
        return self._inner.close_failure

    @property
    def is_stuck(self) -> bool:
        return self._inner.is_stuck


def _is_extra(call: ToolCall) -> bool:
    return call.name is not None and call.name.startswith(EXTRA)


def _filler(turn: ParsedTurn) -> Observation:
    if not turn.calls:
        return Observation([{"role": "user", "content": GO_ON}])
    return Observation([{"role": "tool", "name": call.name or "", "content": GO_ON} for call in turn.calls])


def _longer(messages: Sequence[Message], num_words: int) -> list[Message]:
    *others, last = messages
    content = last.get("content") or ""
    assert isinstance(content, str)
    return [*others, {**last, "content": content + WORD * num_words}]
