"""Agents for tests, in this process: they ask at a door as a client library does."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpcore

from gspo_core.chat import HermesCodec
from gspo_core.env import Environment, EnvironmentFailed, Llm, Start
from gspo_core.environment_contract import NO_REWARD
from gspo_core.messages import Message
from gspo_core.types import Split
from services.episodes.keys import Keys
from services.gateway.agent.attempt import AgentDriver
from services.gateway.agent.door import EpisodeRouter
from services.gateway.agent.judging import JudgeKeys, Judges
from services.gateway.agent.outbound_http import OutboundHttp
from services.gateway.agent.pulled import LoanBoard
from services.gateway.dialects.turns import Answer, Refusal
from services.state.functions import Functions
from services.state.loans import Loans
from services.state.queue import LeasedEpisode
from services.workers.setting import EpisodeSetting, EpisodeSpec
from tests.services.gateway.gateway_kit import read, request
from tests.services.rollout.rollout_kit import Table, make_setting, spec

SECRET = bytes(range(32))


@dataclass
class Client:
    """Asks by key, and again when it is told to."""

    doors: Doors
    llm: Llm

    async def say(self, *messages: Message, **fields: Any) -> Answer:
        return await self._again_and_again(lambda ask: self._take(ask), request(*messages, **fields))

    async def _take(self, ask: Any) -> Answer:
        delivery = await self.doors.now.ask(self.llm.api_key, ask)
        answer = await read(delivery)
        await delivery.delivered()
        return answer

    async def reward(self, value: float, **fields: str) -> None:
        await self._again_and_again(lambda _: self.doors.now.reward(self.llm.reward_key, value, **fields), None)

    async def pay_oneself(self, value: float, **fields: str) -> None:
        """By the key that samples."""
        await self._again_and_again(lambda _: self.doors.now.reward(self.llm.api_key, value, **fields), None)

    async def finish(self) -> None:
        await self._again_and_again(lambda _: self.doors.now.finish(self.llm.api_key), None)

    async def _again_and_again(self, call: Callable[[Any], Awaitable[Any]], ask: Any) -> Any:
        while True:
            try:
                return await call(ask)
            except Refusal as refusal:
                if not refusal.may_retry:
                    raise
                ask = ask and replace(ask, is_retry=True)
                await asyncio.sleep(0.005)


Behavior = Callable[[Client], Awaitable[float | None]]


@dataclass
class Doors:
    """The address of the gateways: behind it is whichever lives."""

    now: EpisodeRouter


def door() -> EpisodeRouter:
    return EpisodeRouter(Keys(SECRET), now=lambda: 1_700_000_000.0, patience_s=0.05)


@dataclass
class AgentWorld:
    """An environment that an agent plays; with ``services`` the agent lives on when its session is closed."""

    behavior: Behavior
    doors: Doors
    replayable: bool = False
    services: dict[str, asyncio.Task[float | None]] | None = None
    pulls: bool = False
    """Nothing is started."""
    starts: list[str] = field(default_factory=list)
    limits: Mapping[str, Any] = field(default_factory=dict)
    name: str = "tests:agent"
    has_snapshot: bool = False
    reward_range: tuple[float, float] | None = None
    tools: Sequence[Any] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of the reward, beside what the agent returns."""

    def num_tasks(self, split: Split) -> int:
        return 10

    async def task(self, split: Split, index: int) -> dict[str, Any]:
        return {"number": index}

    def session(self, *, limits: Any = None, episode_id: str = "") -> AgentHere:
        return AgentHere(self)

    def describe(self) -> Any:
        return {}


class AgentHere:
    """A session whose agent is a task of this process."""

    close_failure: str | None = None
    is_stuck = False
    metrics: Mapping[str, float] = {}
    _llm: Llm

    def __init__(self, world: AgentWorld) -> None:
        self._world = world
        self._running: asyncio.Task[float | None] | None = None

    def offer(self, llm: Llm) -> None:
        self._llm = llm

    async def start(self, task: Mapping[str, Any], seed: int) -> Start:
        world, self._task = self._world, task
        if world.pulls:
            return Start((), ())
        services = world.services if world.services is not None else {}
        running = services.get(self._llm.episode)
        if running is None:
            world.starts.append(self._llm.episode)
            running = asyncio.ensure_future(world.behavior(Client(world.doors, self._llm)))
            services[self._llm.episode] = running
        self._running = running
        return Start((), ())

    async def handed_out(self) -> str:
        return json.dumps(self._task)

    async def ended(self) -> None:
        assert self._running is not None
        try:
            await asyncio.shield(self._running)
        except (Refusal, RuntimeError) as error:
            raise EnvironmentFailed("agent", f"{type(error).__name__}: {error}") from error

    async def score(self) -> tuple[float, dict[str, float]]:
        if self._running is None:
            raise EnvironmentFailed("score", NO_REWARD)
        if not self._running.done() or self._running.exception() is not None or self._running.result() is None:
            raise EnvironmentFailed("score", NO_REWARD)
        return float(self._running.result() or 0.0), dict(self._world.parts)

    async def close(self) -> None:
        if self._running is not None and self._world.services is None:
            self._running.cancel()

    async def act(self, turn: Any) -> Any:
        raise AssertionError

    async def snapshot(self) -> bytes | None:
        raise AssertionError

    async def restore(self, task: Any, seed: int, state: bytes) -> None:
        raise AssertionError


def no_judges() -> Judges:
    """Nothing may be connected to."""
    return Judges(OutboundHttp(httpcore.AsyncConnectionPool(), ()), JudgeKeys(), random.Random(0))


def agent_setting(
    table: Table, codec: HermesCodec, policy: Any, entrance: EpisodeRouter, judges: Judges | None = None, **changes: Any
) -> EpisodeSetting:
    board = LoanBoard(Loans(Functions(table.redis)), look_s=0.01)
    given = judges or no_judges()
    driver = AgentDriver(entrance, "http://gateway/v1", lambda: 1_700_000_000.0, board, given)
    return replace(make_setting(table, codec, policy), driver=driver, **changes)


def agent_order(lease: LeasedEpisode, world: AgentWorld, **changes: Any) -> EpisodeSpec:
    agent = {"url": "http://agent.example/run"} if world.services is not None else {}
    environments = [{"ref": "tests:agent", "agent": agent | changes.pop("agent", {})}]
    given = spec(environments=environments, **changes)
    return EpisodeSpec.from_spec(given, cast(Environment, world), lease, model_context_tokens=4096)
