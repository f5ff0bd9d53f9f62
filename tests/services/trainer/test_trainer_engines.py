"""How a trainer finds its engines, keeps them at the newest weights, shares them and never resumes one it cannot trust.

The engines are scripted: SGLang's protocol without a model; what they sample tells which weights they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gspo_core.versions import WeightsManifest
from services.engines.protocol import Engine, EngineRejected, Generation, info_calls
from services.engines.sglang import EngineClient
from services.engines.weight_group import WeightGroup
from services.files.job_dir import JobDir
from services.files.weights import DamagedVersion, WeightStore
from services.state import heard_engines
from services.state.engine_beats import ANSWER_S, EngineBeats
from services.state.engine_leaving import drain
from services.state.engine_sightings import EngineSightings, Sighting
from services.state.fleet_records import EngineRecord, EngineReport
from services.state.heard_engines import HeardEngines
from services.state.store import Claim, Store
from services.trainer.fleet import engines as engines_module
from services.trainer.fleet.engine_switch import Deadlines, switch
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import FromDisk, ThroughGroup
from tests.apparatus.scripted_engine import Fault, ScriptedEngine, ScriptedTransport
from tests.apparatus.scripted_engine.engine import Ask
from tests.services.rollout.rollout_kit import until
from tests.services.trainer.trainer_kit import make_spec

LEASE_S = 0.6
PROMPT = [1, 2, 3]


@dataclass
class Place:
    """Engines by name, on one network, and jobs that want them."""

    store: Store
    root: Path
    transport: ScriptedTransport
    http: httpx.AsyncClient
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def add_engine(self, name: str, **options: Any) -> ScriptedEngine:
        first = self.root / "first"
        if not first.exists():
            write_model(first)
        engine = ScriptedEngine(first, **{"tick_s": 0.001, **options})
        self.transport.engines[name] = engine
        self.tasks.append(asyncio.create_task(engine.run()))
        return engine

    def announce(self, name: str) -> asyncio.Task[None]:
        """Somebody beats for this engine."""
        beats = EngineBeats(self.store.fleet, info_calls([self.client(f"http://{name}")], ANSWER_S), lease_s=LEASE_S)
        self.tasks.append(task := asyncio.create_task(beats.run()))
        return task

    def client(self, url: str) -> EngineClient:
        return EngineClient(url, self.http)

    def ask(self, url: str) -> asyncio.Task[Generation]:
        """A request that is long enough to be interfered with."""
        call = self.client(url).generate(PROMPT, max_new_tokens=400, temperature=1.0, stop_token_ids=[])
        return asyncio.create_task(call)

    def engines_of(self, claim: Claim, *urls: str, **options: Any) -> Job:
        weights = WeightStore(JobDir(self.root / claim.job_id))
        engines = EnginePool(
            self.store, claim.job_id, claim.token, weights, urls, self.client, **{"lease_s": LEASE_S, **options}
        )
        self.tasks.append(running := asyncio.create_task(engines.run()))
        return Job(claim, weights, engines, running)

    async def records(self) -> dict[str, EngineRecord]:
        return {record.id: record for record in await self.store.fleet.engines()}

    async def report(self, url: str) -> EngineReport:
        report = (await self.records())[url].report
        assert report is not None
        return report

    async def state(self, url: str) -> str | None:
        record = (await self.records()).get(url)
        return record.state if record else None


@dataclass
class Job:
    claim: Claim
    weights: WeightStore
    engines: EnginePool
    running: asyncio.Task[None]

    async def publish(self, version: int, **changes: Any) -> WeightsManifest:
        manifest = self.weights.write(version, self.claim.epoch, version, lambda path: write_model(path, **changes))
        await self.engines.publish(manifest)
        return manifest


class Hang(Fault):
    """Every call is accepted, and never answered."""

    def strikes(self, path: str) -> bool:
        return True


class GatedLoads(FromDisk):
    """Loads are noted, and wait while the gate is closed."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, str]] = []
        """Engine and label."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.forgotten: list[str] = []

    async def forget(self, engine: Engine) -> None:
        self.forgotten.append(engine.url)
        await super().forget(engine)

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        self.loads.append((engine.url, label))
        await self.gate.wait()
        await super().load(engine, path, label, flush=flush, timeout_s=timeout_s)

    async def first_of(self, job: Job, version: int) -> tuple[str, str, WeightsManifest]:
        """Of two engines: the one that is in the middle of its switch to a version, and the one that waits for it."""
        self.gate.clear()
        before = len(self.loads)
        manifest = await job.publish(version)
        await until(lambda: len(self.loads) > before)
        (waits,) = set(job.engines.bound()) - {loads := self.loads[before][0]}
        return loads, waits, manifest


class JointFromDisk(FromDisk):
    """As where one sending reaches all."""

    sends_to_all = True


def write_model(directory: Path, **changes: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["Scripted"], "hidden_size": 8} | changes))
    (directory / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
async def place(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.05)
    monkeypatch.setattr(engines_module, "RETRY_S", 0.05)
    monkeypatch.setattr(engines_module, "EXPLAIN_S", 0.05)
    transport = ScriptedTransport({})
    async with httpx.AsyncClient(transport=transport) as http:
        made = Place(store, tmp_path, transport, http)
        yield made
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


def serves(engine: ScriptedEngine, manifest: WeightsManifest) -> Callable[[], bool]:
    return lambda: engine.label == manifest.label and engine.paused is None


async def test_a_trainer_asks_nothing_while_another_process_looks_and_asks_itself_when_none_does(
    place: Place, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is an engine asked that was seen with other weights: then its trainer finds out, at once."""
    monkeypatch.setattr(heard_engines, "FRESH_S", 0.5)
    monkeypatch.setattr(heard_engines, "_READ_S", 0.0)
    engine = place.add_engine("e")
    sightings = EngineSightings(place.store.functions, time.monotonic)
    assert await sightings.hold()
    numbers = itertools.count(1)

    async def look(label: str) -> None:
        seen = Sighting(number=next(numbers), label=label, answered=bool(label))
        assert await sightings.write({"http://e": seen}, ())

    job = place.engines_of(claim, "http://e", heard=HeardEngines(sightings, time.monotonic))
    manifest = await job.publish(0)
    await job.engines.wait_for(manifest)
    num_looks = 0
    own_look = job.engines._look

    async def counted() -> None:
        nonlocal num_looks
        await own_look()
        num_looks += 1

    monkeypatch.setattr(job.engines, "_look", counted)

    async def looks(num: int, label: str) -> int:
        """Questions that the engine is asked during so many of the trainer's rounds."""
        until_round = num_looks + num
        place.transport.paths.clear()
        while num_looks < until_round:
            await look(label)
            await asyncio.sleep(0.01)
        return place.transport.paths.count("/model_info")

    await looks(3, manifest.label)
    assert await looks(10, manifest.label) == 0
    assert await looks(3, "default") >= 3
    engine.label = engine.shown_label = "default"  # what a restart leaves
    await until(lambda: engine.label == manifest.label)
    place.transport.paths.clear()
    await until(lambda: place.transport.paths.count("/model_info") > 3)  # nobody looks any more


async def test_an_engine_that_leaves_is_given_back_when_its_work_is_done_and_not_before(
    place: Place, claim: Claim
) -> None:
    engines = {name: place.add_engine(name) for name in ("stays", "leaves")}
    job = place.engines_of(claim, "http://stays")
    announcing = place.announce("leaves")
    await job.engines.wait_for(await job.publish(0), num_engines=2)
    running = place.ask("http://leaves")
    await until(lambda: engines["leaves"].num_generated > 5)
    assert await drain(place.store.fleet, ["http://leaves"], 30.0) == []
    assert running.done(), "it was held while it worked"
    assert len((await running).output_ids) == 400
    assert job.engines.bound() == ["http://stays"]
    announcing.cancel()
    await place.store.fleet.remove_engine("http://leaves")
    assert "http://leaves" not in await place.records()
    assert job.engines.metrics()["engine/tokens_lost"] == 0


async def test_an_engine_that_has_no_time_left_leaves_although_it_works(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    await job.engines.wait_for(await job.publish(0))
    before, endless = engine.num_generated, place.ask("http://e")
    await until(lambda: engine.num_generated > before + 5)
    engine.paused = "in_place"  # its request never ends
    assert await drain(place.store.fleet, ["http://e"], 0.3) == ["http://e"]
    endless.cancel()
    await asyncio.gather(endless, return_exceptions=True)


async def test_an_engine_that_was_restarted_is_given_its_weights_again(place: Place, claim: Claim) -> None:
    place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    manifest = await job.publish(0)
    await job.engines.wait_for(manifest)
    assert place.transport.engines["e"].weights == str(job.weights.path(0))
    restarted = place.add_engine("e")
    await until(serves(restarted, manifest))
    assert restarted.weights == str(job.weights.path(0))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"tp_size": 2, "dp_size": 1, "pp_size": 2}, "several stages (pp_size 2)"),
        ({"tp_size": 4, "dp_size": 2, "pp_size": 1}, "several copies (dp_size 2): start one server for each"),
        ({"tp_size": 4, "dp_size": 2, "pp_size": 1, "enable_dp_attention": False}, "several copies (dp_size 2)"),
        ({"tp_size": 1}, "does not say how many ranks it has (dp_size, pp_size)"),
    ],
)
async def test_an_engine_of_another_layout_is_refused_before_it_is_invited_to_a_group(
    place: Place, claim: Claim, layout: dict[str, int], reason: str
) -> None:
    """A group would wait for two minutes for ranks that nobody counted, and leave it dirty."""
    engine = place.add_engine("wide")
    engine.layout = layout
    job = place.engines_of(claim, "http://wide", transport=ThroughGroup())
    await job.publish(0)
    await until(lambda: "http://wide" in job.engines.unfit())
    assert reason in job.engines.unfit()["http://wide"]
    assert "weight_transport disk" in job.engines.unfit()["http://wide"]
    assert (await place.records()).get("http://wide") is None, "it was never bound"
    with pytest.raises(EngineRejected, match=re.escape(reason)):
        await WeightGroup.join([place.client("http://wide")])
    assert place.transport.paths.count("/init_weights_update_group") == 0
    on_disk = place.engines_of(claim, "http://wide")
    manifest = await on_disk.publish(1)
    await on_disk.engines.wait_for(manifest)


@pytest.mark.parametrize("says_so", [True, False])
async def test_an_engine_with_quantised_weights_is_refused_by_name_before_it_is_bound(
    place: Place, claim: Claim, says_so: bool
) -> None:
    """By what it says, or by the folder of its model; a job that waits for engines tells both and what to do."""
    engine = place.add_engine("fp8")
    engine.layout["quantization"] = "fp8" if says_so else "none"
    if not says_so:
        config = place.root / "first" / "config.json"
        quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        config.write_text(json.dumps(json.loads(config.read_text()) | quantised))
    job = place.engines_of(claim, "http://fp8")
    manifest = await job.publish(0)
    told: list[str] = []

    async def explain(_code: str, text: str) -> None:
        told.append(text)

    waiting = asyncio.create_task(job.engines.wait_for(manifest, explain=explain))
    await until(lambda: any("cannot serve this job" in text for text in told))
    waiting.cancel()
    assert "(fp8)" in told[-1]
    assert "start it" in told[-1]
    assert "from the model that the job trains" in told[-1]
    assert (await place.records()).get("http://fp8") is None, "it was never bound"
    assert not {"/pause_generation", "/update_weights_from_disk"} & set(place.transport.paths)


@pytest.mark.parametrize("sync", ["retract", "in_place"])
async def test_requests_in_flight_survive_a_switch_and_its_costs_are_told(
    place: Place, claim: Claim, sync: str
) -> None:
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e", sync=sync)
    await job.engines.wait_for(await job.publish(0))
    before, running = engine.num_generated, place.ask("http://e")
    await until(lambda: engine.num_generated > before + 30)
    newer = await job.publish(1)
    await job.engines.wait_for(newer)
    answer = await running
    assert [span.label for span in answer.spans] == [f"{claim.job_id}/{claim.epoch}/{v}" for v in (0, 1)]
    assert answer.num_retractions == (sync == "retract")
    num_again = job.engines.metrics()["engine/tokens_prefilled_again"]
    assert num_again >= 30 if sync == "retract" else num_again == 0
    assert job.engines.metrics()["engine/tokens_lost"] == 0
    report = await place.report("http://e")
    assert (report.num_switches, report.context_tokens) == (2, engine.context_length)


async def test_a_job_that_waits_for_an_engine_says_which_job_has_it(
    place: Place, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "EXPLAIN_S", 0.05)
    place.add_engine("e")
    other = await place.store.jobs.create(make_spec().model_dump_json())
    owner = await place.store.jobs.claim("trainer-1")
    assert owner is not None
    await place.store.fleet.register_engine(EngineRecord(id="http://e", url="http://e"))
    assert await place.store.fleet.bind(other.id, owner.token, "http://e")
    job, told = place.engines_of(claim, "http://e"), list[str]()

    async def explain(code: str, message: str) -> None:
        told.append(message)

    waiting = asyncio.create_task(job.engines.wait_for(await job.publish(0), explain=explain))
    await until(lambda: any(f"another job, {other.id}, has http://e" in one for one in told))
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_requests_of_another_job_are_ended_when_an_engine_changes_hands(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    engine.label = engine.shown_label = "job_other/1/7"
    stranger = place.ask("http://e")
    await until(lambda: engine.num_generated > 5)
    job = place.engines_of(claim, "http://e")
    await job.engines.wait_for(await job.publish(0))
    answer = await stranger
    assert (answer.finish_reason, [span.label for span in answer.spans]) == ("abort", ["job_other/1/7"])


async def test_a_load_that_fails_half_way_makes_an_engine_dirty_until_a_full_load(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    await job.engines.wait_for(await job.publish(0))
    running = place.ask("http://e")
    await until(lambda: engine.num_generated > 5)
    engine.faults.append(Fault("/update_weights_from_disk", "drop", times=10**6))
    newer = await job.publish(1)

    async def is_dirty() -> bool:
        return await place.state("http://e") == "dirty"

    await until(is_dirty)
    assert engine.paused is not None  # nobody may sample from weights that nobody knows
    assert not job.engines.ready()
    assert "no answer to a weight load" in (await place.report("http://e")).reason
    engine.faults.clear()
    await job.engines.wait_for(newer)
    assert (engine.weights, engine.paused) == (str(job.weights.path(1)), None)
    assert len((await running).output_ids) == 400  # what was in flight there survived


async def test_an_engine_that_refuses_to_go_on_holds_no_known_weights(place: Place, claim: Claim) -> None:
    """The new weights are in it: it must not go on as one that has the old ones."""
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    await job.engines.wait_for(await job.publish(0))
    bound = job.engines._bound["http://e"]
    engine.faults.append(Fault("/continue_generation", "refuse"))
    label = bound.label.replace("/0", "/1")
    assert not await switch(bound, job.weights.path(0), label, "retract", Deadlines(), FromDisk())
    assert (engine.label, bound.label, bound.state) == (label, "", "dirty")


async def test_an_engine_that_misses_a_deadline_is_dirty_and_not_resumed(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    deadlines = Deadlines(answer_s=0.3, pause_s=0.1, load_s=0.5)
    job = place.engines_of(claim, "http://e", deadlines=deadlines)
    await job.engines.wait_for(await job.publish(0))
    engine.faults.append(Fault("/continue_generation", "hang"))
    newer = await job.publish(1)

    async def is_dirty() -> bool:
        return await place.state("http://e") == "dirty"

    await until(is_dirty)
    assert "no answer to resume within" in (await place.report("http://e")).reason
    await job.engines.wait_for(newer)  # the next load heals it


async def test_an_engine_that_is_slow_to_switch_holds_up_no_other(place: Place, claim: Claim) -> None:
    engines = {name: place.add_engine(name) for name in ("slow", "one", "two")}
    job = place.engines_of(claim, *(f"http://{name}" for name in engines), deadlines=Deadlines(pause_s=10**6))
    await job.engines.wait_for(first := await job.publish(0), num_engines=3)
    engines["slow"].faults.append(hang := Fault("/pause_generation", "hang"))
    for version in (1, 2, 3):
        manifest = await job.publish(version)
        # Else it may wait for its turn until there is a newer version, which it is given instead.
        await until(lambda: hang.times == 0)
        await until(serves(engines["one"], manifest))
        await until(serves(engines["two"], manifest))
    assert engines["slow"].label == first.label
    assert {1, 3} <= job.engines.versions_in_use(), "the version that it is being given may be removed"


@pytest.mark.parametrize("transport", [FromDisk, JointFromDisk])
async def test_an_engine_that_does_not_answer_is_left_alone_and_given_back_after_a_lease(
    place: Place, claim: Claim, transport: type[FromDisk]
) -> None:
    engines = {name: place.add_engine(name) for name in ("good", "hangs")}
    urls, deadlines = [f"http://{name}" for name in engines], Deadlines(answer_s=0.3, pause_s=0.3)
    job = place.engines_of(claim, *urls, deadlines=deadlines, transport=transport())
    await job.engines.wait_for(await job.publish(0), num_engines=2)
    engines["hangs"].faults.append(Hang("", "hang"))
    second = await job.publish(1)
    await until(lambda: job.engines.bound() == ["http://good"])
    assert "http://hangs is gone: it has not answered for" in job.engines._what_is_missing(2)
    assert (await place.records())["http://hangs"].job is None
    await until(serves(engines["good"], second))
    engines["hangs"].faults.clear()
    third = await job.publish(2)
    await until(serves(engines["hangs"], third))
    await until(serves(engines["good"], third))


async def test_an_engine_that_falls_silent_between_two_versions_is_given_back_after_a_lease(
    place: Place, claim: Claim
) -> None:
    """Where no engine answers, no step is taken, so no switch would ever find out."""
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e", deadlines=Deadlines(answer_s=0.3))
    await job.engines.wait_for(await job.publish(0))
    engine.faults.append(Hang("", "hang"))
    await until(lambda: job.engines.bound() == [])
    assert "http://e is gone: it has not answered for" in job.engines._what_is_missing(1)


async def test_an_engine_that_does_not_serve_yet_waits_for_no_turn(place: Place, claim: Claim) -> None:
    slow = place.add_engine("a")
    job = place.engines_of(claim, "http://a", "http://b", deadlines=Deadlines(pause_s=10**6))
    await job.engines.wait_for(await job.publish(0))
    slow.faults.append(Fault("/pause_generation", "hang"))
    manifest = await job.publish(1)
    await until(lambda: bool(job.engines._in_switch))
    joins = place.add_engine("b")
    await until(serves(joins, manifest))


async def test_an_engine_that_is_distrusted_while_it_waits_is_loaded_as_a_whole(place: Place, claim: Claim) -> None:
    """What it was sent before is no base for a difference any more."""
    transport = GatedLoads()
    for name in ("a", "b"):
        place.add_engine(name)
    job = place.engines_of(claim, "http://a", "http://b", transport=transport)
    await job.engines.wait_for(await job.publish(0), num_engines=2)
    _, waits, manifest = await transport.first_of(job, 1)
    transport.forgotten.clear()
    await job.engines.distrust(waits, "its numbers are not ours")
    transport.gate.set()
    await job.engines.wait_for(manifest, num_engines=2)
    assert waits in transport.forgotten


async def test_an_engine_that_is_given_back_while_it_is_bound_again_is_no_error(
    place: Place, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add_engine("a")
    job = place.engines_of(claim, "http://a")
    await job.engines.wait_for(await job.publish(0))

    async def bind(*_: object) -> bool:
        await job.engines._give_back("http://a", "is gone")
        return False

    job.running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await job.running
    monkeypatch.setattr(place.store.fleet, "bind", bind)
    await job.engines._keep_bound([EngineRecord(id="http://a", url="http://a")])
    assert job.engines.bound() == []


async def test_an_engine_that_answers_again_within_a_lease_is_loaded_anew(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    deadlines = Deadlines(answer_s=0.3, pause_s=0.3)
    job = place.engines_of(claim, "http://e", deadlines=deadlines, lease_s=10**6)
    await job.engines.wait_for(await job.publish(0))
    bound = job.engines._bound["http://e"]
    engine.faults.append(Hang("", "hang"))
    newer = await job.publish(1)
    await until(lambda: bound.silent_since is not None and not job.engines._switches)
    assert (bound.state, await place.state("http://e")) == ("dirty", "dirty")
    engine.faults.clear()
    await job.engines.wait_for(newer)
    assert job.engines._bound["http://e"] is bound
    assert serves(engine, newer)()


async def test_a_refused_load_leaves_the_old_version_serving(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    old = await job.publish(0)
    await job.engines.wait_for(old)
    lost = job.weights.write(1, claim.epoch, 1, write_model)
    staged = await job.engines._staging.stage(lost)
    staged.rename(staged.with_name("elsewhere"))  # gone between staging and loading
    await job.engines.publish(lost)
    refused = job.engines._bound["http://e"]
    await until(lambda: "Failed to get weights iterator" in refused.reason)
    await until(lambda: engine.paused is None and [one.label for one in job.engines.ready()] == [old.label])
    assert (engine.label, engine.weights) == (old.label, str(job.weights.path(0)))
    assert job.engines.lag() == "http://e holds version 0; the newest is 1"


async def test_no_engine_is_paused_for_a_damaged_version(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    old = await job.publish(0)
    await job.engines.wait_for(old)
    damaged = job.weights.write(1, claim.epoch, 1, write_model)
    (job.weights.path(1) / "model.safetensors").write_bytes(b"somehow")
    await job.engines.publish(damaged)
    with pytest.raises(DamagedVersion):
        await job.running
    assert (engine.label, engine.paused) == (old.label, None)


async def test_an_engine_of_another_shape_is_never_told_to_load(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    await job.publish(0, hidden_size=16)
    await until(lambda: bool(job.engines.unfit()))
    assert job.engines.unfit() == {"http://e": "its model has hidden_size 8, the job's has 16"}
    assert engine.label == "default"


async def test_an_engine_that_ignores_what_it_is_told_is_not_taken_and_the_job_says_why(
    place: Place, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one behind a router that drops fields."""
    engine, generate = place.add_engine("e"), ScriptedEngine.generate

    async def without_space(self: ScriptedEngine, ask: Ask) -> Ask:
        ask.space = None
        return await generate(self, ask)

    monkeypatch.setattr(ScriptedEngine, "generate", without_space)
    job = place.engines_of(claim, "http://e")
    manifest = await job.publish(0)
    await until(lambda: bool(job.engines.unfit()))
    assert "ignores extra_key" in job.engines.unfit()["http://e"]
    assert engine.label == "default"
    monkeypatch.undo()
    await job.engines.wait_for(manifest)


@pytest.mark.parametrize(("profile", "is_taken"), [("0.5.18", False), ("0.5.19", True), ("0.5.21", True)])
async def test_only_engines_that_say_which_weights_sampled_a_token_are_taken(
    place: Place, claim: Claim, profile: str, is_taken: bool
) -> None:
    place.add_engine("e", profile=profile)
    job = place.engines_of(claim, "http://e")
    await job.publish(0)
    await until(lambda: bool(job.engines.unfit() or job.engines.ready()))
    assert bool(job.engines.ready()) == is_taken
    assert is_taken or "SGLang 0.5.18" in job.engines.unfit()["http://e"]


async def test_engines_join_late_leave_and_come_back(place: Place, claim: Claim) -> None:
    place.add_engine("first")
    job = place.engines_of(claim, "http://first")
    manifest = await job.publish(0)
    await job.engines.wait_for(manifest)
    late = place.add_engine("late")  # in nobody's settings: it announces itself
    place.announce("late")
    await job.engines.wait_for(manifest, num_engines=2)
    assert serves(late, manifest)()
    late.kill()
    await until(lambda: [one.url for one in job.engines.ready()] == ["http://first"])
    back = place.add_engine("late")
    await job.engines.wait_for(manifest, num_engines=2)
    assert serves(back, manifest)()


async def claim_new_job(store: Store, trainer: str) -> Claim:
    await store.jobs.create(json.dumps(SPEC), idempotency_key=trainer)
    claim = await store.jobs.claim(trainer)
    assert claim is not None
    await store.jobs.set_status(claim.job_id, "starting", token=claim.token)
    return claim


async def test_what_switches_have_cost_does_not_fall_when_an_engine_leaves(place: Place, claim: Claim) -> None:
    names = ("http://a", "http://b")
    engines = [place.add_engine(name) for name in "ab"]
    job = place.engines_of(claim, *names, sync="abort")
    manifest = await job.publish(0)
    await job.engines.wait_for(manifest, num_engines=2)
    call = place.ask("http://b")
    await until(lambda: engines[1].num_generated > 5)
    manifest = await job.publish(1)
    await job.engines.wait_for(manifest, num_engines=2)
    await call
    before = job.engines.metrics()
    assert before["engine/paused_s"] > 0
    assert before["engine/tokens_lost"] > 0
    engines[1].kill()
    await until(lambda: job.engines.bound() == ["http://a"])
    after = job.engines.metrics()
    assert after.pop("engine/bound") < before.pop("engine/bound")
    assert after == before


async def test_a_second_job_is_given_what_the_first_can_spare(place: Place, store: Store) -> None:
    for name in ("a", "b"):
        place.add_engine(name)
    urls = "http://a", "http://b"
    first = place.engines_of(await claim_new_job(store, "one"), *urls)
    await first.engines.wait_for(await first.publish(0), num_engines=2)
    other = await claim_new_job(store, "two")
    second = place.engines_of(other, *urls)
    await second.engines.wait_for(await second.publish(0))
    held = [sorted(one.url for one in job.engines.ready()) for job in (first, second)]
    assert [len(urls) for urls in held] == [1, 1]
    assert held[0] != held[1]
    for job, (url,) in zip((first, second), held, strict=True):
        engine = place.transport.engines[url.removeprefix("http://")]
        assert engine.weights == str(job.weights.path(0))
        assert engine.label.startswith(job.claim.job_id)
    second.running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await second.running
    await second.engines.release()
    await store.jobs.set_status(other.job_id, "failed", token=other.token)
    await until(lambda: len(first.engines.ready()) == 2)


async def test_a_job_gives_away_no_engine_in_the_middle_of_a_switch_and_overwrites_none_that_it_gave_away(
    place: Place, store: Store
) -> None:
    engines = {f"http://{name}": place.add_engine(name) for name in "ab"}
    gated = GatedLoads()
    first = place.engines_of(await claim_new_job(store, "one"), *engines, transport=gated)
    await first.engines.wait_for(await first.publish(0), num_engines=2)
    loads, waits, newer = await gated.first_of(first, 1)
    second = place.engines_of(await claim_new_job(store, "two"), *engines)
    await second.engines.wait_for(others := await second.publish(0))
    assert [one.url for one in second.engines.ready()] == [waits]
    gated.gate.set()
    await first.engines.wait_for(newer)
    await first.engines.wait_for(last := await first.publish(2))  # whatever the round before still had to do is done
    assert (engines[loads].label, engines[waits].label) == (last.label, others.label)
    assert engines[waits].paused is None
    assert (waits, newer.label) not in gated.loads


async def test_an_engine_that_drains_is_given_back_after_its_switch_or_without_one(place: Place, claim: Claim) -> None:
    engines = {f"http://{name}": place.add_engine(name) for name in "ab"}
    gated = GatedLoads()
    job = place.engines_of(claim, *engines, transport=gated)
    await job.engines.wait_for(old := await job.publish(0), num_engines=2)
    loads, waits, newer = await gated.first_of(job, 1)
    await place.store.fleet.drain_engine(loads)
    await until(lambda: loads in job.engines._draining)
    await place.store.fleet.drain_engine(waits)
    await until(lambda: waits not in job.engines.bound())
    assert job.engines.bound() == [loads]
    gated.gate.set()
    await until(lambda: job.engines.bound() == [])
    assert (engines[loads].label, engines[waits].label) == (newer.label, old.label)
    for url in (loads, waits):
        await place.store.fleet.drain_engine(url, False)
    await job.engines.wait_for(await job.publish(2), num_engines=2)
    assert (waits, newer.label) not in gated.loads


async def test_an_engine_that_another_job_took_after_it_left_the_list_is_not_touched_again(
    place: Place, store: Store
) -> None:
    """Else two jobs would give it their weights in turn, for as long as both run."""
    engine = place.add_engine("a")
    place.add_engine("b")
    first = place.engines_of(await claim_new_job(store, "one"), "http://a", "http://b", num_wanted=2)
    await first.engines.wait_for(await first.publish(0), num_engines=2)
    other = await claim_new_job(store, "two")

    async def taken_by_the_other() -> bool:
        await store.fleet.remove_engine("http://a")  # as `announce` does when it is stopped
        await store.fleet.register_engine(EngineRecord(id="http://a", url="http://a"))
        return await store.fleet.bind(other.job_id, other.token, "http://a")

    await until(taken_by_the_other)
    await until(lambda: first.engines.bound() == ["http://b"])
    engine.label = engine.shown_label = "job_other/1/7"
    manifest = await first.publish(1)
    await first.engines.wait_for(manifest)
    assert (engine.label, first.engines.bound()) == ("job_other/1/7", ["http://b"])
    assert (await place.records())["http://a"].job == other.job_id
    assert "http://a was taken off the list" in first.engines._what_is_missing(2)


async def test_an_engine_that_left_the_list_and_came_back_is_bound_and_reported_again(
    place: Place, claim: Claim
) -> None:
    place.add_engine("a")
    job = place.engines_of(claim, "http://a")
    await job.engines.wait_for(manifest := await job.publish(0))
    await place.store.fleet.remove_engine("http://a")
    place.announce("a")

    async def is_reported() -> bool:
        record = (await place.records()).get("http://a")
        return record is not None and (record.job, record.state, record.label) == (
            claim.job_id,
            "ready",
            manifest.label,
        )

    await until(is_reported)
    await job.engines.wait_for(manifest)


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_report_that_is_refused_shows_that_the_binding_was_lost(
    place: Place, claim: Claim, is_listed: bool
) -> None:
    """Also where the list that was read is older than the loss; and what left the list alone is let go."""
    place.add_engine("a")
    job = place.engines_of(claim, *(["http://a"] if is_listed else []))
    announced = place.announce("a")
    await job.engines.wait_for(await job.publish(0))
    announced.cancel()
    job.running.cancel()
    await asyncio.gather(announced, job.running, return_exceptions=True)
    records = await place.store.fleet.engines()
    await place.store.fleet.remove_engine("http://a")
    if is_listed:
        await place.store.fleet.register_engine(EngineRecord(id="http://a", url="http://a"))
    await job.engines.distrust("http://a", "its log-probs differ")
    assert await place.state("http://a") is None
    await job.engines._keep_bound(records)
    if is_listed:
        assert await place.state("http://a") == "dirty"
    else:
        assert job.engines.bound() == []


async def test_what_a_dead_owner_held_and_its_successor_spares_goes_to_the_job_without(
    place: Place, store: Store, redis_client: Redis
) -> None:
    lost = [place.add_engine(name) for name in ("a", "b")][1]
    urls = "http://a", "http://b"
    claim = await claim_new_job(store, "one")
    first = place.engines_of(claim, *urls)
    await first.engines.wait_for(await first.publish(0), num_engines=2)
    first.running.cancel()
    await asyncio.gather(first.running, return_exceptions=True)
    lost.kill()
    other = await claim_new_job(store, "two")
    hasty, successor = Store(redis_client, lease_s=0.5), None
    while successor is None:
        await store.jobs.beat(other.job_id, other.token)
        successor = await hasty.jobs.claim("three")
    assert (successor.job_id, successor.epoch) == (claim.job_id, claim.epoch + 1)
    second, third = place.engines_of(other, *urls), place.engines_of(successor, *urls)
    await third.engines.wait_for(await third.publish(1))
    place.add_engine("b")
    await second.engines.wait_for(await second.publish(0))
    assert (third.engines.bound(), second.engines.bound()) == (["http://a"], ["http://b"])


SPEC = {"model": "somewhere", "environments": [{"ref": "environments.calculator:Calculator"}]}


async def test_an_engine_that_drains_ends_what_it_has_gets_no_version_and_is_given_back(
    place: Place, claim: Claim
) -> None:
    leaving, staying = place.add_engine("leaving"), place.add_engine("staying")
    job = place.engines_of(claim, "http://leaving", "http://staying")
    await job.engines.wait_for(first := await job.publish(0), num_engines=2)
    before, running = leaving.num_generated, place.ask("http://leaving")
    await until(lambda: leaving.num_generated > before + 30)
    await place.store.fleet.drain_engine("http://leaving")
    await until(lambda: [one.url for one in job.engines.ready()] == ["http://staying"])
    second = await job.publish(1)
    await job.engines.wait_for(second)
    assert serves(staying, second)()
    assert leaving.label == first.label
    records = await place.records()
    assert (records["http://leaving"].job, records["http://leaving"].state) == (job.claim.job_id, "draining")
    answer = await running
    assert (len(answer.output_ids), {span.label for span in answer.spans}) == (400, {first.label})
    await until(lambda: job.engines.bound() == ["http://staying"])
    for _ in range(20):  # and nobody takes it
        await asyncio.sleep(0.01)
        assert job.engines.bound() == ["http://staying"]
    assert (await place.records())["http://leaving"].job is None
    await place.store.fleet.drain_engine("http://leaving", False)
    await until(serves(leaving, second))


async def test_a_draining_engine_that_is_gone_is_given_back_and_the_only_one_is_missed(
    place: Place, claim: Claim
) -> None:
    place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    await job.engines.wait_for(await job.publish(0))
    await place.store.fleet.drain_engine("http://e")
    await until(lambda: not job.engines.ready())
    del place.transport.engines["e"]
    await until(lambda: job.engines.bound() == [])
    assert "http://e is draining" in job.engines._what_is_missing(1)
    place.add_engine("e")
    await place.store.fleet.drain_engine("http://e", False)
    await until(lambda: [one.url for one in job.engines.ready()] == ["http://e"])


async def test_a_job_that_lost_all_its_engines_says_which_they_were_until_one_is_back(
    place: Place, claim: Claim
) -> None:
    for name in ("a", "b"):
        place.add_engine(name)
    job = place.engines_of(claim, "http://a", "http://b")
    await job.engines.wait_for(await job.publish(0), num_engines=2)
    assert job.engines.absence() is None
    del place.transport.engines["a"]
    await until(lambda: job.engines.bound() == ["http://b"])
    assert job.engines.absence() is None
    del place.transport.engines["b"]
    await until(lambda: job.engines.bound() == [])
    said = job.engines.absence()
    assert said is not None
    assert re.fullmatch(r"http://a is gone: .*connection refused.*; http://b is gone: .*connection refused.*", said)
    place.add_engine("b")
    await until(lambda: bool(job.engines.ready()))
    assert job.engines.absence() is None


async def test_an_engine_that_switches_is_not_missed(place: Place, claim: Claim) -> None:
    engine = place.add_engine("e")
    job = place.engines_of(claim, "http://e")
    await job.engines.wait_for(await job.publish(0))
    engine.faults.append(Fault("/continue_generation", "hang"))
    await job.publish(1)
    await until(lambda: not job.engines.ready())
    assert job.engines.absence() is None


async def test_an_engine_that_never_answered_is_named(place: Place, claim: Claim) -> None:
    job = place.engines_of(claim, "http://nowhere")
    await job.publish(0)
    await until(lambda: job.engines.absence() == "http://nowhere does not answer")
    assert "http://nowhere does not answer" in job.engines._what_is_missing(1)
