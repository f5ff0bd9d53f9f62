"""Which engine an episode asks: one that serves its job and nobody distrusts, the one it knows, else the idlest.

Engines are scripted and in this process; what they sample tells which weights they hold.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gspo_core.types import CacheMode
from gspo_core.versions import WeightFile, WeightsManifest
from services.engines.protocol import ContextFull, EngineError, EngineRejected, EngineUnavailable
from services.engines.sglang import EngineClient
from services.episodes.metering import Counters
from services.episodes.policy import Sampled
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.retry import Backoff, Retrier
from services.workers import engines as engines_module
from services.workers.engines import EngineTable, JobEngines
from tests.apparatus.scripted_engine import Fault, ScriptedEngine, ScriptedTransport
from tests.services.rollout.rollout_kit import until

JOB = "job_a"
VOCAB_SIZE = 300


def manifest(version: int) -> WeightsManifest:
    return WeightsManifest(JOB, version, 1, version, (WeightFile("model.safetensors", 1, "0" * 64),))


@dataclass
class Place:
    """What a worker sees: engines, the table of them in Redis, the published versions."""

    transport: ScriptedTransport
    http: httpx.AsyncClient
    records: list[EngineRecord] = field(default_factory=list)
    published: list[WeightsManifest] = field(default_factory=lambda: [manifest(0)])
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    num_read: int = 0
    """Manifests beside the current one."""

    async def engines(self) -> list[EngineRecord]:
        return self.records

    async def current(self, job: str) -> WeightsManifest | None:
        return self.published[-1]

    async def manifests(self, job: str, numbers: Collection[int]) -> list[WeightsManifest]:
        found = [one for one in self.published if one.version in numbers]
        self.num_read += len(found)
        return found

    def add(self, name: str, *, label: str = f"{JOB}/1/0", **options: Any) -> ScriptedEngine:
        engine = ScriptedEngine("w0", **{"tick_s": 0.001, "vocab_size": VOCAB_SIZE, **options})
        engine.label = engine.shown_label = label
        self.transport.engines[name] = engine
        self.tasks.append(asyncio.create_task(engine.run()))
        url = f"http://{name}"
        self.records.append(EngineRecord(id=url, url=url, job=JOB, report=EngineReport(EngineState.READY)))
        return engine

    def say(self, number: int, **changes: Any) -> None:
        self.records[number] = msgspec.structs.replace(self.records[number], **changes)

    def worker(self, *, in_place: bool = False, urls: tuple[str, ...] = (), watched: bool = True) -> Worker:
        counters = Counters()
        retrier = Retrier(counters, random.Random(0), Backoff(first_s=0.001, max_s=0.01))
        table = EngineTable(self, urls, lambda url: EngineClient(url, self.http), time.monotonic, retrier, silence_s=5)
        engines = JobEngines(
            table,
            self,
            JOB,
            max_staleness=1,
            vocab_size=VOCAB_SIZE,
            retrier=retrier,
            counters=counters,
            clock=time.monotonic,
            leaving=asyncio.Event(),
            in_place=in_place,
        )
        if watched:
            self.tasks += [asyncio.create_task(table.watch()), asyncio.create_task(engines.watch())]
        return Worker(table, engines, counters)


@dataclass
class Worker:
    table: EngineTable
    engines: JobEngines
    counters: Counters

    def ask(self, num: int = 5, prompt: int = 1, prefer: str = "") -> asyncio.Task[Sampled]:
        ids = [prompt, 2, 3]
        call = self.engines.sample(
            ids, max_new_tokens=num, temperature=1.0, stop_token_ids=[], prefer_engine=prefer and f"http://{prefer}"
        )
        return asyncio.create_task(call)

    async def until_usable(self, num: int) -> None:
        await until(lambda: len(self.engines.usable()) == num)


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(engines_module, "REFRESH_S", 0.01)
    monkeypatch.setattr(engines_module, "LOAD_S", 0.02)
    transport = ScriptedTransport({})
    async with httpx.AsyncClient(transport=transport) as http:
        made = Place(transport, http)
        yield made
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_an_episode_stays_with_the_engine_that_knows_it_and_others_spread(place: Place) -> None:
    engines = {name: place.add(name) for name in ("a", "b")}
    worker = place.worker()
    await worker.until_usable(2)
    answers = await asyncio.gather(*(worker.ask(30, prompt=number, prefer="b") for number in range(4)))
    assert {answer.engine_id for answer in answers} == {"http://b"}
    assert engines["a"].num_generated == 0
    answers = await asyncio.gather(*(worker.ask(100, prompt=number) for number in range(10)))
    assert sorted(answer.engine_id for answer in answers) == ["http://a"] * 5 + ["http://b"] * 5
    calls = [worker.ask(100, prompt=number, prefer="b") for number in range(14)]  # more than it should keep
    assert {answer.engine_id for answer in await asyncio.gather(*calls)} == {"http://a", "http://b"}


async def test_what_is_not_ours_or_not_trusted_is_asked_nothing(place: Place) -> None:
    ours = place.add("ours")
    others = [
        place.add("foreign", label="job_b/1/0"),
        place.add("fresh", label="default"),
        place.add("dirty"),
        place.add("rebound"),
        place.add("stale", label=f"{JOB}/1/0"),
    ]
    place.say(3, report=EngineReport(EngineState.DIRTY))
    place.say(4, job="job_b")
    place.published = [manifest(version) for version in range(4)]
    ours.label = ours.shown_label = f"{JOB}/1/3"
    worker = place.worker()
    await worker.until_usable(1)
    answers = await asyncio.gather(*(worker.ask() for _ in range(6)))
    assert {answer.engine_id for answer in answers} == {"http://ours"}
    assert [engine.num_generated for engine in others] == [0] * 5


async def test_nothing_is_asked_before_the_age_of_its_weights_can_be_known(place: Place) -> None:
    engine = place.add("stale", label=f"{JOB}/1/0")
    place.published = [manifest(version) for version in range(4)]
    worker = place.worker(watched=False)
    await worker.table.refresh()
    assert [str(one.label) for one in worker.table.serving(JOB)] == [f"{JOB}/1/0"]
    assert (worker.engines.usable(), worker.engines.has_room()) == ([], False), "nobody has looked at the versions yet"
    await worker.engines.refresh()
    assert worker.engines.usable() == [], "three steps behind"
    engine.label = engine.shown_label = f"{JOB}/1/3"
    await worker.table.refresh()
    assert worker.engines.has_room()


async def test_of_a_long_run_no_more_versions_are_read_than_engines_name(place: Place) -> None:
    """All of twenty thousand hold up a worker for more than a second, at each new version."""
    place.published = [manifest(version) for version in range(1000)]
    engines = [place.add("a", label=f"{JOB}/1/998"), place.add("b", label=f"{JOB}/1/997")]
    worker = place.worker(watched=False)
    for newest in range(1000, 1020):
        await worker.table.refresh()
        await worker.engines.refresh()
        assert [one.url for one in worker.engines.usable()] == ["http://a"], "one step behind; the other is two"
        for engine, age in zip(engines, (1, 2), strict=True):
            engine.label = engine.shown_label = f"{JOB}/1/{newest - age}"
        place.published.append(manifest(newest))
    assert place.num_read == 2


async def test_an_engine_that_is_added_takes_load_at_once(place: Place) -> None:
    place.add("old")
    worker = place.worker()
    await worker.until_usable(1)
    busy = [worker.ask(400, prompt=number) for number in range(4)]
    late = place.add("late")
    await worker.until_usable(2)
    answer = await worker.ask()
    assert answer.engine_id == "http://late"
    assert late.num_generated == 5
    for call in busy:
        call.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


async def test_a_request_goes_on_elsewhere_when_its_engine_dies(place: Place) -> None:
    dying = place.add("dying")
    worker = place.worker()
    await worker.until_usable(1)
    call = worker.ask(300)
    await until(lambda: dying.num_generated > 10)
    place.add("other")
    dying.kill()
    answer = await call
    assert (answer.engine_id, len(answer.ids)) == ("http://other", 300)
    assert worker.counters.snapshot()["engine/EngineUnavailable"] >= 1


async def test_requests_leave_an_engine_that_became_dirty_where_another_serves(place: Place) -> None:
    dirty = place.add("dirty")
    worker = place.worker()
    await worker.until_usable(1)
    call = worker.ask(300)
    await until(lambda: dirty.num_generated > 10)
    await dirty.pause("retract")
    place.add("other")
    await worker.until_usable(2)
    place.say(0, report=EngineReport(EngineState.DIRTY))
    assert (await call).engine_id == "http://other"


async def test_an_engine_that_drains_gets_nothing_new_and_ends_what_it_has(place: Place) -> None:
    leaving = place.add("leaving")
    worker = place.worker()
    await worker.until_usable(1)
    call = worker.ask(300)
    await until(lambda: leaving.num_generated > 10)
    place.add("other")
    await worker.until_usable(2)
    place.say(0, draining=True, report=EngineReport(EngineState.DRAINING))
    await worker.until_usable(1)
    assert {one.engine_id for one in await asyncio.gather(*(worker.ask(prefer="leaving") for _ in range(6)))} == {
        "http://other"
    }
    answer = await call
    assert (answer.engine_id, len(answer.ids)) == ("http://leaving", 300)


async def test_an_id_that_the_model_does_not_have_is_neither_sent_nor_taken(place: Place) -> None:
    """It can crash an engine, and with it everybody's episodes. One client serves models of several sizes."""
    place.add("larger", vocab_size=VOCAB_SIZE + 1, script=lambda ids: [VOCAB_SIZE])
    worker = place.worker()
    await worker.until_usable(1)
    with pytest.raises(EngineRejected, match=rf"not sent: input ids must be in \[0, {VOCAB_SIZE}\), not {VOCAB_SIZE}"):
        await worker.ask(prompt=VOCAB_SIZE)
    call = worker.ask(num=1)
    await until(lambda: worker.counters.snapshot().get("engine/EngineProtocolError", 0) > 0)
    place.add("sound")
    assert (await call).engine_id == "http://sound"


async def test_tokens_with_another_jobs_label_or_broken_answers_are_thrown_away(place: Place) -> None:
    lying = place.add("lying")
    place.add("honest", tick_s=0.002)
    worker = place.worker()
    await worker.until_usable(2)
    lying.label = "job_b/1/0"  # what samples; what it shows is still ours
    lying.faults.append(Fault("/generate", "garbage", times=1))
    answers = await asyncio.gather(*(worker.ask(prompt=number, prefer="lying") for number in range(3)))
    assert {answer.engine_id for answer in answers} == {"http://honest"}
    counted = worker.counters.snapshot()
    assert counted["engine/InvalidAnswer"] >= 1
    assert counted["engine/EngineProtocolError"] == 1


async def test_tokens_of_a_version_that_nobody_published_are_thrown_away(place: Place) -> None:
    """The trainer could give them no age: each of its attempts would end at them."""
    lying = place.add("lying")
    place.add("honest", tick_s=0.002)
    worker = place.worker()
    await worker.until_usable(2)
    lying.label = f"{JOB}/1/1700000"  # what samples; what it shows was published
    answers = await asyncio.gather(*(worker.ask(prompt=number, prefer="lying") for number in range(3)))
    assert {answer.engine_id for answer in answers} == {"http://honest"}
    assert worker.counters["engine/InvalidAnswer"] >= 1


async def test_a_version_that_was_published_since_the_last_look_is_known_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = place.add("a")
    worker = place.worker()
    await worker.until_usable(1)
    monkeypatch.setattr(engines_module, "REFRESH_S", 60.0)
    await asyncio.sleep(0.05)
    place.published.append(manifest(1))
    engine.label = engine.shown_label = f"{JOB}/1/1"
    assert [span.version for span in (await worker.ask()).spans] == [1]
    assert "engine/InvalidAnswer" not in worker.counters.snapshot()


async def test_an_engine_that_lags_is_avoided_also_when_an_answer_was_the_first_to_tell_of_the_newest_version(
    place: Place,
) -> None:
    place.add("lagging", label=f"{JOB}/1/0")
    place.add("newest", label=f"{JOB}/1/2")
    worker = place.worker()
    await worker.until_usable(2)  # nobody has said yet that version 2 is published
    place.published += [manifest(1), manifest(2)]
    await worker.engines._require_published([2], "http://newest")
    assert [engine.url for engine in worker.engines.usable()] == ["http://newest"]
    await worker.engines.refresh()
    assert [engine.url for engine in worker.engines.usable()] == ["http://newest"]
    answers = await asyncio.gather(*(worker.ask(prompt=number, prefer="lagging") for number in range(3)))
    assert {answer.engine_id for answer in answers} == {"http://newest"}


async def test_what_one_engine_refuses_another_may_take(place: Place) -> None:
    place.add("short", context_length=8)
    long = place.add("long")
    worker = place.worker()
    await worker.until_usable(2)
    answers = await asyncio.gather(*(worker.ask(20, prompt=number, prefer="short") for number in range(3)))
    assert {answer.engine_id for answer in answers} == {"http://long"}
    assert worker.counters["engine/EngineRejected"] >= 1
    long.label = long.shown_label = "job_b/1/0"
    await worker.until_usable(1)
    with pytest.raises(EngineRejected):
        await worker.ask(20)


async def test_no_request_goes_beyond_the_longest_sequence_that_an_engine_samples(place: Place) -> None:
    """Its answer is the shorter, and what has no room left is told apart from what an engine does not take."""
    place.add("short", context_length=8)
    place.say(0, report=EngineReport(EngineState.READY, context_tokens=8))
    worker = place.worker()
    await worker.until_usable(1)
    assert len((await worker.ask(20)).ids) == 5

    def one_more(prefer: str = "") -> Coroutine[Any, Any, Sampled]:
        ids = list(range(8))
        return worker.engines.sample(ids, max_new_tokens=1, temperature=1.0, stop_token_ids=[], prefer_engine=prefer)

    with pytest.raises(ContextFull):
        await one_more()
    place.add("long")
    await worker.until_usable(2)
    assert (await one_more("http://short")).engine_id == "http://long"
    assert "engine/EngineRejected" not in worker.counters.snapshot()


@pytest.mark.parametrize(("status", "error"), [(400, EngineRejected), (404, EngineRejected), (429, EngineUnavailable)])
async def test_too_many_requests_is_no_word_about_the_request(status: int, error: type[EngineError]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json={"error": "no"}))
    async with httpx.AsyncClient(transport=transport) as http:
        with pytest.raises(error):
            await EngineClient("http://e", http).generate([1], max_new_tokens=1, temperature=1.0, stop_token_ids=[])


async def test_an_engine_that_is_in_no_table_any_more_has_no_owner_who_distrusts_it(place: Place) -> None:
    place.add("dirty")
    place.say(0, report=EngineReport(EngineState.DIRTY))
    worker = place.worker(urls=("http://dirty",))
    await until(lambda: bool(worker.table.num_requests()))
    await worker.table.refresh()
    await worker.until_usable(0)
    place.records.clear()
    await worker.until_usable(1)


@pytest.mark.parametrize("in_place", [True, False])
async def test_tokens_on_keys_of_an_earlier_version_are_marked(place: Place, in_place: bool, tmp_path: Path) -> None:
    engine = place.add("e")
    worker = place.worker(in_place=in_place)
    await worker.until_usable(1)
    call = worker.ask(300)
    await until(lambda: engine.num_generated > 10)
    client = EngineClient("http://e", place.http)
    await client.pause("in_place" if in_place else "retract")
    await client.load_weights(tmp_path, f"{JOB}/1/1", flush_cache=not in_place)
    place.published = [manifest(0), manifest(1)]
    await client.resume()
    answer = await call
    assert [span.version for span in answer.spans] == [0, 1]
    assert answer.cache_mode is (CacheMode.STALE if in_place else CacheMode.FRESH)
    await until(lambda: str(worker.engines.usable()[0].label) == f"{JOB}/1/1")
    assert (await worker.ask()).cache_mode is CacheMode.FRESH


async def test_no_episode_is_begun_while_requests_queue_up(place: Place) -> None:
    engine = place.add("e", max_running=2)
    worker = place.worker()
    await worker.until_usable(1)
    assert worker.engines.has_room()
    calls = [worker.ask(400, prompt=number) for number in range(4)]
    await until(lambda: not worker.engines.has_room())
    assert len(engine.waiting) == 2
    await asyncio.gather(*calls)
    await until(worker.engines.has_room)


async def test_requests_beyond_what_an_engine_runs_wait_here_and_go_to_another(place: Place) -> None:
    """One engine runs three at once, which nobody told us; another one comes later. There are more requests than the
    first may be given while its reports still come before they do, which doubles what it is given."""
    place.add("small", max_running=3, tick_s=0.01)
    worker = place.worker()
    await worker.until_usable(1)
    seen = worker.engines.usable()[0]
    calls = [worker.ask(10, prompt=number) for number in range(300)]
    await until(lambda: seen.limit.value <= 5)
    late = place.add("late", max_running=40)
    await asyncio.gather(*calls)
    assert late.num_generated > 10 * 20, "most of those that were not in the small one yet"
    assert worker.engines.has_room()


async def test_those_who_wait_longest_are_next(place: Place) -> None:
    place.add("e", max_running=1)
    worker = place.worker()
    await worker.until_usable(1)
    worker.engines.usable()[0].limit.value = 1
    order: list[int] = []

    async def ask(number: int) -> None:
        await worker.ask(3, prompt=number)
        order.append(number)

    await asyncio.gather(*(ask(number) for number in range(8)))
    assert order == list(range(8))
