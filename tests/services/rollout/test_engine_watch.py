"""One process looks at the engines for all; its death, its blindness and a trainer's word cost nobody the truth."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import pytest

from services.engines.protocol import Engine
from services.engines.sglang import EngineClient
from services.episodes.metering import Counters
from services.state import engine_sightings
from services.state.client import Away, AwayReason
from services.state.engine_sightings import EngineSightings, Sighting
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.retry import Backoff, Retrier
from services.state.store import Claim, Store
from services.workers import engine_watch
from services.workers.engine_watch import Hearsay
from services.workers.engines import EngineTable
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport
from tests.patience import HANG_S
from tests.services.rollout.rollout_kit import until

TICK_S = 0.05


class Client(EngineClient):
    """Names of scripted engines are on no network: their end is told by themselves."""

    engine: ScriptedEngine

    async def until_lost(self) -> None:
        await self.engine.dead.wait()


@dataclass
class Worker:
    table: EngineTable
    sightings: EngineSightings
    running: asyncio.Task[None]
    blind: set[str]

    def label(self, name: str) -> str:
        engine = self.table._engines.get(f"http://{name}")
        return str(engine.label) if engine and engine.label else ""


@dataclass
class Place:
    store: Store
    transport: ScriptedTransport
    http: httpx.AsyncClient
    workers: list[Worker] = field(default_factory=list)

    def add_engine(self, name: str, label: str) -> ScriptedEngine:
        engine = ScriptedEngine("w")
        engine.label = engine.shown_label = label
        self.transport.engines[name] = engine
        return engine

    def add_worker(self, *, blind: bool = False) -> Worker:
        hidden: set[str] = set()

        def connect(url: str) -> Engine:
            if blind:
                return EngineClient("http://nobody", self.http)
            client = Client(url, self.http)
            client.engine = self.transport.engines[httpx.URL(url).host]
            return client

        retrier = Retrier(Counters(), random.Random(0), Backoff(first_s=0.001, max_s=0.01))
        sightings = EngineSightings(self.store.functions, time.monotonic)
        urls = [f"http://{name}" for name in self.transport.engines]
        table = EngineTable(self.store.fleet, urls, connect, time.monotonic, retrier, sightings=sightings)
        worker = Worker(table, sightings, asyncio.create_task(table.watch()), hidden)
        self.workers.append(worker)
        return worker

    def all_know(self, name: str, label: str) -> bool:
        return all(worker.label(name) == label for worker in self.workers)

    def num(self, path: str) -> int:
        return self.transport.paths.count(path)

    async def first_worker(self, *, blind: bool = False) -> Worker:
        """The one that looks."""
        worker = self.add_worker(blind=blind)
        await until_async(worker.sightings.all)
        return worker


async def until_async(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def place(store: Store, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(engine_watch, "TICK_S", TICK_S)
    monkeypatch.setattr(engine_watch, "WATCH_LEASE_S", 0.4)
    monkeypatch.setattr(engine_sightings, "WATCH_LEASE_S", 0.4)
    transport = ScriptedTransport({})
    async with httpx.AsyncClient(transport=transport) as http:
        made = Place(store, transport, http)
        yield made
        for worker in made.workers:
            worker.running.cancel()
        await asyncio.gather(*(worker.running for worker in made.workers), return_exceptions=True)


async def test_one_asks_however_many_wait_to_hear(place: Place) -> None:
    for name in ("a", "b"):
        place.add_engine(name, "job/1/0")
    await place.first_worker()
    for _ in range(7):
        place.add_worker()
    await until(lambda: place.all_know("a", "job/1/0") and place.all_know("b", "job/1/0"))
    # Until somebody looks each may have asked for itself.
    infos, loads = place.num("/model_info"), place.num("/v1/loads")
    await until(lambda: place.num("/v1/loads") >= loads + 20)
    num_infos, num_loads = place.num("/model_info") - infos, place.num("/v1/loads") - loads
    assert num_infos <= num_loads / 2 + 2, "each of the others would have asked ten times a second"


async def test_a_trainers_report_is_heard_without_asking(place: Place, claim: Claim, store: Store) -> None:
    place.add_engine("a", "job/1/0")
    await place.first_worker()
    for _ in range(3):
        place.add_worker()
    await until(lambda: place.all_know("a", "job/1/0"))
    await store.fleet.register_engine(EngineRecord(id="http://a", url="http://a"))
    assert await store.fleet.bind(claim.job_id, claim.token, "http://a")
    label = f"{claim.job_id}/1/7"
    place.transport.engines["a"].shown_label = label
    await store.fleet.mark(claim.job_id, claim.token, "http://a", EngineReport(EngineState.READY, label))
    await until(lambda: place.all_know("a", label))


async def test_an_engine_that_ends_is_known_to_have_ended(place: Place) -> None:
    engine = place.add_engine("a", "job/1/0")
    await place.first_worker()
    place.add_worker()
    await until(lambda: place.all_know("a", "job/1/0"))
    engine.kill()
    await until(lambda: place.all_know("a", ""))


async def test_another_looks_when_the_one_who_looks_is_killed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = place.add_engine("a", "job/1/0")
    first = await place.first_worker()
    others = [place.add_worker() for _ in range(3)]
    await until(lambda: place.all_know("a", "job/1/0"))

    async def nothing() -> None:
        raise Away(AwayReason.UNREACHABLE, "it was killed")

    monkeypatch.setattr(first.sightings, "leave", nothing)
    first.running.cancel()
    await asyncio.gather(first.running, return_exceptions=True)
    place.workers.remove(first)
    engine.shown_label = "job/1/1"
    await until(lambda: place.all_know("a", "job/1/1"))
    await until_async(lambda: _any_holds(others))
    assert not await first.sightings.write({"http://a": Sighting(number=1, label="lie", answered=True)}, ())


async def _any_holds(workers: list[Worker]) -> bool:
    return any([await worker.sightings.hold() for worker in workers])


async def test_one_who_leaves_lets_another_look_at_once(place: Place) -> None:
    place.add_engine("a", "job/1/0")
    first = await place.first_worker()
    first.running.cancel()
    await asyncio.gather(first.running, return_exceptions=True)
    assert await EngineSightings(place.store.functions, time.monotonic).hold()


async def test_an_engine_that_the_one_who_looks_cannot_reach_is_asked_by_the_others(place: Place) -> None:
    place.add_engine("a", "job/1/0")
    blind = await place.first_worker(blind=True)
    seeing = place.add_worker()
    await until(lambda: seeing.label("a") == "job/1/0")
    assert blind.label("a") == ""
    seen = await seeing.sightings.all()
    assert not seen["http://a"].answered


async def test_what_is_no_longer_there_is_forgotten(place: Place, store: Store) -> None:
    place.add_engine("a", "job/1/0")
    worker = await place.first_worker()
    place.add_engine("b", "job/1/0")
    await store.fleet.register_engine(EngineRecord(id="http://b", url="http://b"))
    await until_async(lambda: _are_seen(worker, {"http://a", "http://b"}))
    await store.fleet.remove_engine("http://b")
    await until_async(lambda: _are_seen(worker, {"http://a"}))


async def _are_seen(worker: Worker, urls: set[str]) -> bool:
    return (await worker.sightings.all()).keys() == urls


def test_the_newer_of_a_report_and_a_sighting_decides() -> None:
    old = Sighting(number=1, label="job/1/0", answered=True, reported="job/1/0")
    report = EngineReport(EngineState.READY, "job/1/1")
    heard = Hearsay()
    assert heard.label(None, 0.0) is None, "nobody has said anything"
    heard.hear(old, 0.0)
    assert heard.label(None, 0.0) == "job/1/0"
    assert heard.label(report, 0.0) == "job/1/1", "it was not known when the engine was looked at"
    restarted = Sighting(number=2, label="default", answered=True, reported="job/1/1")
    heard.hear(restarted, 1.0)
    assert heard.label(report, 1.0) == "default"
    assert heard.label(report, 1.0 + engine_watch.STALE_S + 0.1) is None, "whoever looked has gone"
    heard.hear(Sighting(number=3, reported="job/1/1"), 2.0)
    assert heard.label(report, 2.0) is None
    assert heard.may_ask(2.0)
    assert not heard.may_ask(2.0)
