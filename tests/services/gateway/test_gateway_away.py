"""While no engine samples for a job, its agents are held: streams stay alive, turns are not lost, no time is charged.

Engines are scripted and in this process, found as a gateway finds them; the clock of the episode is set by hand.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest

from gspo_core.chat import HermesCodec
from gspo_core.types import StopReason
from gspo_core.versions import WeightFile, WeightsManifest
from services.engines.sglang import EngineClient
from services.episodes.metering import Counters, Meter, Timings
from services.episodes.tree import TokenTree
from services.gateway.agent.episode import AgentEpisode
from services.gateway.http.streams import Pace
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.retry import Backoff, Retrier
from services.workers import engines as engines_module
from services.workers.engines import EngineTable, JobEngines
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport
from tests.services.gateway.agent_kit import door
from tests.services.gateway.fake_turns import Gateway, serving
from tests.services.gateway.gateway_kit import HeldRecords, quick_order, quick_setting
from tests.services.rollout.rollout_kit import JOB, until

LABEL = f"{JOB}/1/0"
ALIVE = Pace(commit_after_s=0.0, alive_every_s=0.01)
LIMIT_S = 60.0
AWAY_S = 5000.0
# As many tokens as are asked for, none of which ends a turn.
SAID = list(b"Hello")
PUBLISHED = WeightsManifest(JOB, 0, 1, 0, (WeightFile("model.safetensors", 1, "0" * 64),))


@dataclass
class Fleet:
    """The engines that are registered, and the versions that were published."""

    transport: ScriptedTransport
    vocab_size: int
    records: list[EngineRecord] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def engines(self) -> list[EngineRecord]:
        return self.records

    async def current(self, job: str) -> WeightsManifest | None:
        return PUBLISHED

    async def manifests(self, job: str, numbers: Collection[int]) -> list[WeightsManifest]:
        return [PUBLISHED] if PUBLISHED.version in numbers else []

    def come(self, name: str, tick_s: float | None = 0.0) -> ScriptedEngine:
        engine = ScriptedEngine("w0", tick_s=tick_s, vocab_size=self.vocab_size, script=lambda ids: SAID)
        engine.label = engine.shown_label = LABEL
        self.transport.engines[name] = engine
        self.tasks.append(asyncio.create_task(engine.run()))
        url = f"http://{name}"
        self.records = [EngineRecord(id=url, url=url, job=JOB, report=EngineReport(EngineState.READY))]
        return engine

    def go(self) -> None:
        self.records = []


@dataclass
class Played:
    """An open episode at a gateway."""

    fleet: Fleet
    engines: JobEngines
    episode: AgentEpisode
    meter: Meter
    records: HeldRecords
    gateway: Gateway
    key: str
    now: list[float]

    async def stream(self, text: str, lines: list[str]) -> list[Any]:
        """The events of a turn; adds each line to ``lines`` as it comes."""
        body = {
            "model": "policy",
            "stream": True,
            "max_tokens": len(SAID),
            "messages": [{"role": "user", "content": text}],
        }
        headers = {"authorization": f"Bearer {self.key}"}
        async with self.gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                lines.append(line)
        told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert told.pop() == "[DONE]"
        return [json.loads(one) for one in told]


async def see_life(turn: asyncio.Task[Any], lines: list[str]) -> None:
    """Until two more signs of life have come."""
    seen = num_signs(lines)
    await until(lambda: turn.done() or num_signs(lines) >= seen + 2)
    assert not turn.done(), turn.result()


def num_signs(lines: list[str]) -> int:
    return sum(line.startswith(":") for line in lines)


@pytest.fixture
async def played(codec: HermesCodec, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Played]:
    monkeypatch.setattr(engines_module, "REFRESH_S", 0.01)
    now, counters, transport = [1000.0], Counters(), ScriptedTransport({})
    retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.01))
    async with httpx.AsyncClient(transport=transport) as http:
        fleet = Fleet(transport, codec.tokenizer.vocab_size)
        table = EngineTable(fleet, (), lambda url: EngineClient(url, http), time.monotonic, retrier)
        engines = JobEngines(
            table,
            fleet,
            JOB,
            max_staleness=1,
            vocab_size=fleet.vocab_size,
            retrier=retrier,
            counters=counters,
            clock=lambda: now[0],
            leaving=asyncio.Event(),
        )
        fleet.tasks += [asyncio.create_task(table.watch()), asyncio.create_task(engines.watch())]
        records, order = HeldRecords(), quick_order(limits={"episode_timeout_s": LIMIT_S})
        setting = quick_setting(records, codec, engines, clock=lambda: now[0])
        meter = Meter(Timings(), setting.counters, setting.clock)
        episode = AgentEpisode(
            setting, order, TokenTree(order.key, 0, order.temperature), meter, lambda: 1_700_000_000.0
        )
        entrance = door()
        try:
            async with serving(cast(Any, entrance), ALIVE) as gateway:
                with entrance.open(episode) as key:
                    yield Played(fleet, engines, episode, meter, records, gateway, key, now)
        finally:
            for task in fleet.tasks:
                task.cancel()
            await asyncio.gather(*fleet.tasks, return_exceptions=True)


async def test_a_turn_is_held_while_engines_are_away_and_ends_when_one_is_back(played: Played) -> None:
    first = played.fleet.come("first", tick_s=None)  # takes the request and says nothing
    await until(lambda: len(played.engines.usable()) == 1)
    lines: list[str] = []
    turn = asyncio.create_task(played.stream("Hello.", lines))
    await until(lambda: bool(first.running or first.waiting))
    played.fleet.go()
    await until(lambda: not played.engines.usable())
    await see_life(turn, lines)
    played.now[0] += AWAY_S
    await see_life(turn, lines)
    second = played.fleet.come("second")
    events = await turn
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len(played.episode.history.entries) == 1
    (entry,) = played.episode.history.entries.values()
    assert entry.delivered
    segments = played.records.segments()
    assert sum(one.num_actions for one in segments) == second.num_generated == 5
    assert (first.num_generated, played.episode.stopped) == (0, None)
    # The time away is that of a queue: it is told, and nobody pays for it.
    assert played.meter.billed_s < LIMIT_S
    assert played.meter.timings.queue_s == pytest.approx(AWAY_S)
    assert len(await played.stream("Again.", [])) > 0


async def test_requests_beside_one_that_is_held_are_held_too_and_not_out_of_time(played: Played) -> None:
    held, beside = list[str](), list[str]()
    turns = [asyncio.create_task(played.stream("Hello.", held))]
    await see_life(turns[0], held)
    played.now[0] += AWAY_S
    turns.append(asyncio.create_task(played.stream("A sub-agent.", beside)))
    await see_life(turns[1], beside)
    played.now[0] += AWAY_S
    played.fleet.come("first")
    for events in await asyncio.gather(*turns):
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(one.num_actions for one in played.records.segments()) == 10
    assert played.meter.billed_s < LIMIT_S
    assert played.meter.timings.queue_s == pytest.approx(2 * AWAY_S)


async def test_time_that_the_agent_takes_itself_is_charged_without_any_engine(played: Played) -> None:
    played.now[0] += LIMIT_S + 1
    body = {"model": "policy", "messages": [{"role": "user", "content": "Late."}]}
    headers = {"authorization": f"Bearer {played.key}"}
    answer = await played.gateway.http.post("/v1/chat/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "rollout_stopped")
    assert played.episode.stopped is StopReason.EPISODE_TIMEOUT
