"""Plays one episode of an environment with a policy, as a rollout worker would, and stores nothing.

Rule: an episode ends for the reasons that it ends for in training, and is scored alike. A failure that the policy did
not cause is tried again, as often as the limits say; then the episode has no reward, which is not a reward of 0.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gspo_core.env import AgentEnvironment, AgentSession, Environment, EnvironmentFailed, Session
from gspo_core.episode_limits import TurnTally, settled_reward, within
from gspo_core.evaluation.played import EpisodePlace, Played
from gspo_core.evaluation.policy import EvaluatedPolicy, PolicyConversation, PolicyFailed, PolicyTurn
from gspo_core.json_value import JSON
from gspo_core.messages import Message
from gspo_core.spec import EpisodeLimits
from gspo_core.types import Split, StopReason


@dataclass(frozen=True, slots=True)
class World:
    """What is played, and within which limits."""

    environment: Environment
    split: Split
    limits: EpisodeLimits
    max_turn_tokens: int
    """Sampled tokens of one turn."""
    clock: Callable[[], float]
    """Monotonic seconds."""

    @property
    def broken_reward(self) -> float:
        return (self.environment.reward_range or (0.0, 0.0))[0]


async def play(world: World, policy: EvaluatedPolicy, place: EpisodePlace, seed: int) -> Played:
    """Raises ``PolicyUnusable``."""
    began = world.clock()
    failure = ""
    for _ in range(world.limits.retries + 1):
        try:
            if isinstance(world.environment, AgentEnvironment):
                return await _play_agent(world, world.environment, policy, place, seed, began)
            return await _Play(world, policy, place, seed).played(began)
        except (EnvironmentFailed, PolicyFailed) as error:
            failure = str(error)
    took_s = world.clock() - began
    return Played(place, seed, StopReason.ENV_ERROR.value, None, failure, duration_s=took_s)


class _Play:
    """One attempt."""

    def __init__(self, world: World, policy: EvaluatedPolicy, place: EpisodePlace, seed: int) -> None:
        self._world = world
        self._place, self._seed = place, seed
        self._policy = policy
        self._tally = TurnTally()
        self._messages: list[Message] = []
        self._num_turns = 0
        self._num_tokens: int | None = 0

    async def played(self, began: float) -> Played:
        world = self._world
        task = await world.environment.task(world.split, self._place.task)
        session = world.environment.session(limits=world.limits, episode_id=f"eval-{self._place}")
        try:
            conversation = self._policy.converse(str(self._place), self._seed, world.limits)
            stop = await self._begin(session, conversation, task)
            while stop is None:
                stop = await self._take_turn(session, conversation, began)
            reward, parts = await self._score(session, stop)
            metrics = {name: value for name, value in session.metrics.items() if math.isfinite(value)}
        finally:
            await session.close()
        return Played(
            self._place,
            self._seed,
            stop.value,
            reward,
            parts=parts,
            metrics=metrics,
            num_turns=self._num_turns,
            num_tokens=self._num_tokens,
            num_calls=self._tally.num_calls,
            num_parse_errors=self._tally.num_parse_errors,
            duration_s=world.clock() - began,
            messages=self._messages,
        )

    async def _begin(
        self, session: Session, conversation: PolicyConversation, task: Mapping[str, JSON]
    ) -> StopReason | None:
        start = await session.start(task, self._seed)
        self._messages += start.messages
        return conversation.begin(start)

    async def _take_turn(self, session: Session, conversation: PolicyConversation, began: float) -> StopReason | None:
        limits = self._world.limits
        if (remaining := self._remaining_tokens()) <= 0:
            return StopReason.MAX_TOKENS
        if self._world.clock() - began > limits.episode_timeout_s:
            return StopReason.EPISODE_TIMEOUT
        turn = await conversation.answer(remaining)
        if isinstance(turn, StopReason):
            return turn
        self._count(turn)
        if (stop := turn.stop or self._tally.judge(turn.parsed, limits)) is not None:
            return stop
        observation = await session.act(turn.parsed)
        if observation.reward is not None:
            self._tally.pay(self._num_turns - 1, observation.reward)
        messages, _ = within(observation.messages, limits.max_observation_chars)
        self._messages += messages
        if observation.done:
            return observation.stop_reason
        if self._num_turns >= limits.max_turns:
            return StopReason.MAX_TURNS
        return conversation.read(turn, messages)

    def _count(self, turn: PolicyTurn) -> None:
        self._messages.append(turn.message)
        self._num_turns += 1
        known = self._num_tokens is not None and turn.num_tokens is not None
        self._num_tokens = (self._num_tokens or 0) + (turn.num_tokens or 0) if known else None

    def _remaining_tokens(self) -> int:
        left = self._world.limits.max_episode_tokens - (self._num_tokens or 0)
        return min(self._world.max_turn_tokens, left)

    async def _score(self, session: Session, stop: StopReason) -> tuple[float, Mapping[str, float]]:
        world = self._world
        known = settled_reward(stop, on_truncation=world.limits.on_truncation, broken_reward=world.broken_reward)
        if known is not None:
            return known, {}
        reward, parts = await session.score()
        return reward + self._tally.turn_rewards, parts


async def _play_agent(
    world: World, environment: AgentEnvironment, policy: EvaluatedPolicy, place: EpisodePlace, seed: int, began: float
) -> Played:
    """One attempt of an agent that owns its loop. What it asks for, and is answered, passes by us."""
    task = await environment.task(world.split, place.task)
    session: AgentSession = environment.session(limits=world.limits, episode_id=f"eval-{place}")
    try:
        session.offer(policy.llm(f"eval-{place}"))
        await session.start(task, seed)
        stop = await _until_ended(session, world.limits.episode_timeout_s)
        reward, parts = await session.score()
        metrics = {name: value for name, value in session.metrics.items() if math.isfinite(value)}
    finally:
        await session.close()
    took_s = world.clock() - began
    return Played(place, seed, stop.value, reward, parts=parts, metrics=metrics, duration_s=took_s)


async def _until_ended(session: AgentSession, timeout_s: float) -> StopReason:
    try:
        async with asyncio.timeout(timeout_s):
            await session.ended()
    except TimeoutError:
        return StopReason.EPISODE_TIMEOUT
    return StopReason.COMPLETED
