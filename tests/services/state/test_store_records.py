"""Events, versions, metrics, environments, engines and workers in the store."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from redis.asyncio import Redis

from gspo_core.position import Position
from gspo_core.versions import WeightFile, WeightsManifest
from services.state.fleet_records import EngineRecord, EngineReport, EngineState, TrainerRecord, WorkerRecord
from services.state.functions import LIBRARY_VERSION, Functions, LibraryTooNew, library
from services.state.keys import InvalidJobId, job_key, job_keys, service_key, service_keys
from services.state.queue import Bus, Fenced
from services.state.refusals import Conflict, Missing
from services.state.store import Claim, InvalidCursor, JobEvent, JobNotFound, Store, Version

if TYPE_CHECKING:
    from tests.services.conftest import LossyProxy

pytestmark = pytest.mark.every_server


def manifest(job: str, version: int, *, epoch: int = 1, step: int = 0, digest: str = "0") -> WeightsManifest:
    files = (WeightFile("config.json", 10, "1" * 64), WeightFile("model.safetensors", 1 << 40, digest * 64))
    return WeightsManifest(job, version, epoch, step, files)


# Events


async def test_events_are_read_in_order_and_resumed_after_any_of_them(store: Store, claim: Claim) -> None:
    job = claim.job_id
    data = {"step": 41, "reward/mean": 0.1, "text": "Grüße, 世界"}
    ids = [await store.events.add(job, "step", data | {"n": n}) for n in range(5)]
    events = await store.events.read(job)
    assert [event.id for event in events[-5:]] == ids
    assert events[-1].data == data | {"n": 4}
    assert events[-1].created_at.endswith("Z")
    for position, event in enumerate(events):
        assert await store.events.read(job, event.id) == events[position + 1 :]
    assert await store.events.read(job, "0", count=2) == events[:2]


async def test_a_reader_waits_for_the_next_event(store: Store, claim: Claim) -> None:
    last = (await store.events.read(claim.job_id))[-1].id
    waiting = asyncio.create_task(store.events.read(claim.job_id, last, block_ms=5000))
    event_id = await store.events.add(claim.job_id, "log", {"message": "x"})
    assert [event.id for event in await waiting] == [event_id]
    assert await store.events.read(claim.job_id, event_id, block_ms=1) == []


async def test_an_event_whose_reply_is_lost_is_added_once(
    proxy: LossyProxy, lossy_client: Redis, store: Store, claim: Claim
) -> None:
    proxy.disturb(b"gspo_add_event", lose_reply={0, 1})
    event_id = await Store(lossy_client).events.add(claim.job_id, "log", {})
    assert [event.id for event in await store.events.read(claim.job_id) if event.type == "log"] == [event_id]


async def test_trimmed_history_is_announced_exactly(store: Store, claim: Claim) -> None:
    job = claim.job_id
    await store.events.trim(job, 0)
    ids = [await store.events.add(job, "log", {"n": n}) for n in range(10)]
    await store.events.trim(job, 4)

    def of(events: list[JobEvent]) -> list[tuple[str, str]]:
        return [(event.type, event.id) for event in events]

    rest = [("log", event_id) for event_id in ids[6:]]
    for missed in ("0", ids[0], ids[4]):
        [gap, *events] = await store.events.read(job, missed)
        assert gap.type == "gap"
        assert gap.data == {"resumed_after": missed, "first_available": ids[6]}
        assert of(events) == rest
        assert of(await store.events.read(job, gap.id)) == rest, "who resumes after the gap is not told twice"
    assert of(await store.events.read(job, ids[5])) == rest, "nothing after it is gone"
    assert of(await store.events.read(job, ids[7])) == rest[2:]
    await store.events.trim(job, 0)
    [gap] = await store.events.read(job, ids[7])
    assert gap.data == {"resumed_after": ids[7], "first_available": None}


async def test_events_are_bounded(store: Store, claim: Claim, redis_client: Redis) -> None:
    job, keys = claim.job_id, job_keys(claim.job_id)
    for first in range(0, 11_000, 1000):
        async with redis_client.pipeline(transaction=False) as pipeline:
            for number in range(first, first + 1000):
                pipeline.execute_command("FCALL", "gspo_add_event", len(keys), *keys, "", f"n{number}", "log", "{}")
            await pipeline.execute()
    assert 10_000 <= await redis_client.xlen(job_key(job, "events")) < 10_500
    # events of the store itself have no nonce
    assert await redis_client.hlen(job_key(job, "event_nonces")) == await redis_client.xlen(job_key(job, "events"))
    assert (await store.events.read(job, "0", count=1))[0].type == "gap"


@pytest.mark.parametrize("after", ["", "x", "-1", "5-", "1-2-3", "$", "1" * 17, "0\n"])
async def test_a_position_that_is_none_is_refused(store: Store, claim: Claim, after: str) -> None:
    with pytest.raises(InvalidCursor):
        await store.events.read(claim.job_id, after)


async def test_an_event_is_json(store: Store, claim: Claim) -> None:
    with pytest.raises(ValueError, match="JSON"):
        await store.events.add(claim.job_id, "step", {"loss": math.nan})


# Versions


async def test_versions_count_from_zero_and_are_never_handed_out_twice(store: Store, claim: Claim) -> None:
    job, token = claim.job_id, claim.token
    assert await store.versions.current(job) is None
    handed_out = [await store.versions.next(job, token) for _ in range(3)]
    assert handed_out == [0, 1, 2]
    assert await store.versions.next(job, token, at_least=37) == 37
    await store.versions.publish(job, token, manifest(job, 50))
    assert await store.versions.next(job, token, at_least=4) == 51


async def test_a_lost_reply_wastes_a_number_at_most(
    proxy: LossyProxy, lossy_client: Redis, store: Store, claim: Claim
) -> None:
    proxy.disturb(b"gspo_next_version", lose_reply={0})
    first = await Store(lossy_client).versions.next(claim.job_id, claim.token)
    assert await store.versions.next(claim.job_id, claim.token) > first


async def test_published_versions_are_kept_as_they_were(store: Store, claim: Claim) -> None:
    job, token = claim.job_id, claim.token
    published = [manifest(job, 0), manifest(job, 2, step=1), manifest(job, 10, epoch=2, step=1)]
    for one in published:
        await store.versions.publish(job, token, one)
        await store.versions.publish(job, token, one)
        assert await store.versions.current(job) == one
    assert await store.versions.all(job) == published
    assert (await store.jobs.get(job)).policy_version == 10


async def test_a_version_never_names_two_weight_sets(store: Store, claim: Claim) -> None:
    job, token = claim.job_id, claim.token
    await store.versions.publish(job, token, manifest(job, 3))
    for other in (manifest(job, 3, digest="f"), manifest(job, 3, step=1), manifest(job, 2)):
        with pytest.raises(Conflict):
            await store.versions.publish(job, token, other)
    with pytest.raises(ValueError, match="does not belong to job"):
        await store.versions.publish(job, token, manifest("other", 4))
    assert await store.versions.all(job) == [manifest(job, 3)]


# Metrics


async def test_metrics_keep_every_bit_and_their_order(store: Store, claim: Claim) -> None:
    job = claim.job_id
    values = {
        "reward/mean": 0.1,
        "gspo/ratio_mean": 1 / 3,
        "tiny": 5e-324,
        "huge": 1.7e308,
        "count": 2**53,
        "zero": -0.0,
    }
    for step in (10, 2, 0):
        await store.metrics.add(job, step, values)
    rows = await store.metrics.read(job)
    assert [row["step"] for row in rows] == [0, 2, 10]
    assert all({name: row[name] for name in values} == values for row in rows)
    assert [row["step"] for row in await store.metrics.read(job, 2)] == [2, 10]
    assert await store.metrics.read(job, 11) == []


async def test_one_call_reads_a_bounded_number_of_steps(
    store: Store, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = claim.job_id
    for step in range(9):
        await store.metrics.add(job, step, {"loss": float(step)})
    monkeypatch.setattr("services.state.reports.STEPS_AT_ONCE", 4)
    sizes, call = list[int](), store.functions.call

    async def counted(*args: Any) -> Any:
        rows = await call(*args)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(store.functions, "call", counted)
    assert [row["step"] for row in await store.metrics.read(job)] == list(range(9))
    assert sizes == [4, 4, 1]
    for first, limit in ((0, 1), (2, 5), (7, 5), (9, 1), (0, 0)):
        sizes.clear()
        rows = await store.metrics.read(job, first, limit)
        assert [row["step"] for row in rows] == list(range(9))[first : first + limit]
        assert sum(sizes) == len(rows)
    # as an earlier release asks, and as its functions answer
    assert len(await call("read_metrics", job_keys(job), 0)) == 9

    async def uncounted(name: str, keys: list[str], first: int, count: int) -> Any:
        return await call(name, keys, first)

    monkeypatch.setattr(store.functions, "call", uncounted)
    assert [row["step"] for row in await store.metrics.read(job)] == list(range(9))
    assert [row["step"] for row in await store.metrics.read(job, 2, 5)] == [2, 3, 4, 5, 6]


async def test_a_step_that_runs_again_replaces_what_it_said(store: Store, claim: Claim) -> None:
    await store.metrics.add(claim.job_id, 1, {"loss": 1.0, "reward/mean": 0.5})
    await store.metrics.add(claim.job_id, 1, {"loss": 2.0})
    await store.metrics.add(claim.job_id, 1, {"eval/success": 0.25})
    assert await store.metrics.read(claim.job_id) == [
        {"step": 1, "eval/success": 0.25, "loss": 2.0, "reward/mean": 0.5}
    ]


async def test_a_step_that_is_taken_again_says_nothing_of_the_history_that_was_left(store: Store, claim: Claim) -> None:
    async def report(at: Position, loss: float) -> None:
        await store.metrics.report(claim.job_id, at, {"loss": loss}, {"step": at.step}, token=claim.token)

    await report(Position(1, 30), 1.0)
    await store.metrics.add(claim.job_id, 30, {"eval/reward/mean": 0.25})
    for _ in range(2):  # said again, since the answer was lost, it is known
        await report(Position(3, 30), 2.0)
        assert await store.metrics.read(claim.job_id) == [{"step": 30, "loss": 2.0}]
    await store.metrics.add(claim.job_id, 30, {"eval/reward/mean": 0.75})
    await report(Position(3, 30), 2.0)
    assert await store.metrics.read(claim.job_id) == [{"step": 30, "eval/reward/mean": 0.75, "loss": 2.0}]


@pytest.mark.parametrize(("num_metrics", "kilobytes"), [(80, 3.0), (200, 7.5)])
async def test_the_records_of_a_job_that_is_over_stay_until_it_is_removed(
    store: Store, claim: Claim, redis_client: Redis, num_metrics: int, kilobytes: float
) -> None:
    job, token, num_steps = claim.job_id, claim.token, 200
    rng = random.Random(0)
    for step in range(num_steps):
        numbers = {f"group_{number % 9}/metric_{number}": rng.random() for number in range(num_metrics)}
        await store.metrics.add(job, step, numbers, token=token)
    await store.versions.publish(job, token, manifest(job, 0))
    await store.jobs.set_status(job, "failed", token=token)
    kept = [job_key(job, name) for name in ("metrics", "versions", "events")]
    assert await redis_client.exists(*kept) == 3
    size = await redis_client.memory_usage(kept[0], samples=0)
    assert size / num_steps / 1000 == pytest.approx(kilobytes, rel=0.2)
    await store.jobs.remove(job)
    assert [key async for key in redis_client.scan_iter(f"gspo:{{{job}}}:*")] == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_metric_is_a_finite_number(store: Store, claim: Claim, value: float) -> None:
    with pytest.raises(ValueError, match="loss of step 1 is not a finite number"):
        await store.metrics.add(claim.job_id, 1, {"reward": 1.0, "loss": value})
    assert await store.metrics.read(claim.job_id) == []


# Environments


async def test_the_first_description_of_an_environment_holds(store: Store, claim: Claim) -> None:
    job = claim.job_id
    first = {"num_tasks": {"train": 100, "eval": 20}, "name": "calculator"}
    assert await store.environments.get(job, 0) is None
    assert await store.environments.describe(job, 0, first) == first
    assert await store.environments.describe(job, 0, {"num_tasks": {"train": 1}}) == first
    assert await store.environments.describe(job, 1, {"num_tasks": {"train": 1}}) != first
    assert await store.environments.get(job, 0) == first


# Engines and workers


async def test_engines_and_workers_are_listed_with_their_beats(store: Store) -> None:
    await store.fleet.register_engine(EngineRecord(id="e1", url="http://a"))
    await store.fleet.register_engine(EngineRecord(id="e0", url="http://b"))
    await store.fleet.register_engine(EngineRecord(id="e1", url="http://c"))
    await store.fleet.register_worker(WorkerRecord(id="w"))
    assert await store.fleet.engines() == [
        EngineRecord(id="e0", url="http://b", beats=1),
        EngineRecord(id="e1", url="http://c", beats=2),
    ]
    assert await store.fleet.workers() == [WorkerRecord(id="w", beats=1)]
    await store.fleet.remove_engine("e1")
    await store.fleet.delist("worker", "w")
    assert [engine.id for engine in await store.fleet.engines()] == ["e0"]
    assert await store.fleet.workers() == []


@pytest.mark.parametrize("name", [None, "", 3])
async def test_a_record_names_what_it_is_about(store: Store, name: Any) -> None:
    with pytest.raises(ValueError, match="under 'id'"):
        await store.fleet.register_engine(EngineRecord(id=name))


async def test_an_engine_drains_until_that_is_taken_back_or_it_is_gone(store: Store, claim: Claim) -> None:
    for name in ("e0", "e1"):
        await store.fleet.register_engine(EngineRecord(id=name))
    await store.fleet.bind(claim.job_id, claim.token, "e0")
    for _ in range(2):
        await store.fleet.drain_engine("e0")
    assert [(one.job, one.draining) for one in await store.fleet.engines()] == [
        (claim.job_id, True),
        (None, False),
    ]
    await store.fleet.drain_engine("e0", False)
    assert not any(one.draining for one in await store.fleet.engines())
    await store.fleet.drain_engine("e1")
    await store.fleet.remove_engine("e1")
    await store.fleet.register_engine(EngineRecord(id="e1"))
    assert not any(one.draining for one in await store.fleet.engines())


async def test_an_engine_serves_one_job_at_a_time(store: Store, claim: Claim) -> None:
    await store.jobs.create("{}")
    other = await store.jobs.claim("other")
    assert other is not None
    await store.fleet.register_engine(EngineRecord(id="e"))
    assert await store.fleet.bind(claim.job_id, claim.token, "e") is True
    assert await store.fleet.bind(claim.job_id, claim.token, "e") is True
    assert await store.fleet.bind(other.job_id, other.token, "e") is False
    await store.fleet.unbind(other.job_id, other.token, "e")
    assert (await store.fleet.engines())[0].job == claim.job_id
    await store.fleet.unbind(claim.job_id, claim.token, "e")
    assert await store.fleet.bind(other.job_id, other.token, "e") is True
    with pytest.raises(Missing):
        await store.fleet.bind(other.job_id, other.token, "no engine")


async def test_only_who_holds_an_engine_says_how_it_is(store: Store, claim: Claim) -> None:
    await store.fleet.register_engine(EngineRecord(id="e"))
    assert not await store.fleet.mark(claim.job_id, claim.token, "e", EngineReport(EngineState.READY))
    await store.fleet.bind(claim.job_id, claim.token, "e")
    assert await store.fleet.mark(claim.job_id, claim.token, "e", EngineReport(EngineState.DIRTY))
    assert not await store.fleet.mark(claim.job_id, "another", "e", EngineReport(EngineState.READY))
    await store.fleet.register_engine(EngineRecord(id="e"))  # a beat says nothing about it
    assert (await store.fleet.engines())[0].state == "dirty"
    await store.fleet.unbind(claim.job_id, claim.token, "e")
    assert (await store.fleet.engines())[0].report is None


async def test_an_engine_of_a_finished_job_is_free(store: Store, claim: Claim) -> None:
    await store.jobs.create("{}")
    other = await store.jobs.claim("other")
    assert other is not None
    await store.fleet.register_engine(EngineRecord(id="e"))
    await store.fleet.bind(claim.job_id, claim.token, "e")
    await store.fleet.mark(claim.job_id, claim.token, "e", EngineReport(EngineState.READY))
    await store.jobs.set_status(claim.job_id, "failed", token=claim.token)
    (engine,) = await store.fleet.engines()
    assert (engine.job, engine.state) == (None, None), "its trainer may have died before it gave it back"
    assert (await store.fleet.everyone()).engines[0].job is None
    assert await store.fleet.bind(other.job_id, other.token, "e") is True


async def test_a_new_owner_inherits_the_engine_and_the_old_one_cannot_give_it_away(store: Store, claim: Claim) -> None:
    await store.fleet.register_engine(EngineRecord(id="e"))
    await store.fleet.bind(claim.job_id, claim.token, "e")
    await store.jobs.release(claim.job_id, claim.token)
    heir = await store.jobs.claim("heir")
    assert heir is not None
    assert await store.fleet.bind(heir.job_id, heir.token, "e") is True
    await store.fleet.unbind(claim.job_id, claim.token, "e")
    assert (await store.fleet.engines())[0].job == claim.job_id


# The library


async def test_the_library_is_loaded_once_and_by_whoever_misses_it(redis_client: Redis, claim: Claim) -> None:
    functions = Functions(redis_client)
    before = (await redis_client.info("commandstats")).get("cmdstat_function|load", {"calls": 0})["calls"]
    await functions.load()
    await functions.load()
    after = (await redis_client.info("commandstats"))["cmdstat_function|load"]["calls"]
    assert after == before
    await redis_client.function_flush()
    await Store(redis_client).jobs.beat(claim.job_id, claim.token)


async def test_many_processes_load_the_library_at_once(redis_client: Redis) -> None:
    await redis_client.function_flush()
    await asyncio.gather(*(Functions(redis_client).load() for _ in range(8)))
    assert await Functions(redis_client).call("version", ()) == [LIBRARY_VERSION, library()[1].encode()]


async def test_a_newer_library_is_not_replaced_by_an_older_one(redis_client: Redis) -> None:
    source, digest = library()
    newer = source.replace(f"VERSION, DIGEST = {LIBRARY_VERSION},", f"VERSION, DIGEST = {LIBRARY_VERSION + 1},")
    await redis_client.function_load(newer, replace=True)
    with pytest.raises(LibraryTooNew, match="upgrade this process"):
        await Store(redis_client).load_functions()
    await redis_client.function_flush()
    older = source.replace(f"VERSION, DIGEST = {LIBRARY_VERSION},", f"VERSION, DIGEST = {LIBRARY_VERSION - 1},")
    await redis_client.function_load(older, replace=True)
    await Store(redis_client).load_functions()
    assert await Functions(redis_client).call("version", ()) == [LIBRARY_VERSION, digest.encode()]


@pytest.mark.parametrize("job", ["", "a}", "{a", "a/b", "a b", "x" * 65, "é"])
def test_a_job_id_cannot_escape_from_its_hash_tag(job: str) -> None:
    with pytest.raises(InvalidJobId):
        job_key(job, "events")


async def test_every_key_of_a_job_lies_in_its_slot(store: Store, claim: Claim, redis_client: Redis) -> None:
    await store.fleet.register_engine(EngineRecord(id="e"))
    tags = set()
    async for key in redis_client.scan_iter():
        prefix, tag, _name = key.decode().split(":")
        assert prefix == "gspo"
        tags.add(tag)
    assert tags == {f"{{{claim.job_id}}}", "{service}"}
    msgspec.json.encode(await store.fleet.engines())


# What nobody renews any more


async def test_a_write_about_a_job_that_is_not_there_makes_no_key(store: Store, redis_client: Redis) -> None:
    """A worker that outlived its server's memory must not make half of a job."""
    writes = [
        store.events.add("job_gone", "env.health", {}),
        store.metrics.add("job_gone", 1, {"x": 1.0}),
        store.environments.describe("job_gone", 0, {}),
    ]
    for write in writes:
        with pytest.raises(JobNotFound):
            await write
    assert await redis_client.keys("gspo:{job_gone}:*") == []


async def test_idempotency_keys_are_bounded_and_the_oldest_go(store: Store, redis_client: Redis) -> None:
    first = await store.jobs.create("{}", idempotency_key="first")
    keys = service_keys()
    async with redis_client.pipeline(transaction=False) as pipeline:
        for number in range(10_000):
            pipeline.execute_command("FCALL", "gspo_reserve", len(keys), *keys, f"digest{number}", f"job_{number}")
        await pipeline.execute()
    assert await redis_client.hlen(service_key("idempotency")) == 10_000
    assert await redis_client.zcard(service_key("idempotency_order")) == 10_000
    assert await redis_client.hget(service_key("idempotency"), "digest0") == b"job_0"
    # the oldest one is forgotten, hence a new job
    assert (await store.jobs.create("{}", idempotency_key="first")).id != first.id


async def test_who_is_silent_while_all_others_show_up_is_forgotten(store: Store, redis_client: Redis) -> None:
    bus = Bus(redis_client)
    for name in ("dead", "alive"):
        await store.fleet.register_worker(WorkerRecord(id=name))
        await store.fleet.register_trainer(TrainerRecord(id=name, device="cpu"))
    lost = await bus.join("dead")
    alive = await bus.join("alive")
    for _ in range(300):
        await store.fleet.register_worker(WorkerRecord(id="alive"))
        await store.fleet.register_trainer(TrainerRecord(id="alive", device="cpu"))
    assert {worker.id for worker in await store.fleet.workers()} == {"alive", "dead"}
    for _ in range(150):
        await store.fleet.register_worker(WorkerRecord(id="alive"))
        await bus.beat("alive", alive)
        await store.fleet.register_trainer(TrainerRecord(id="alive", device="cpu"))
        await store.fleet.register_trainer(TrainerRecord(id="alive", device="cpu"))
    assert [worker.id for worker in await store.fleet.workers()] == ["alive"]
    assert [trainer.id for trainer in await store.fleet.trainers()] == ["alive"]
    assert await redis_client.hkeys(service_key("lease_tokens")) == [b"alive"]
    assert await redis_client.zcard(service_key("worker_signs")) == 1
    with pytest.raises(Fenced):
        await bus.beat("dead", lost)


async def test_who_beats_is_not_forgotten_although_it_never_registers(store: Store, redis_client: Redis) -> None:
    bus = Bus(redis_client)
    token = await bus.join("quiet")
    for _ in range(40):
        for _ in range(25):
            await store.fleet.register_worker(WorkerRecord(id="loud"))
        await bus.beat("quiet", token)


async def test_an_engine_that_is_bound_is_kept_however_silent_it_is(store: Store, claim: Claim) -> None:
    functions = Functions(store._functions.redis)
    await store.fleet.register_engine(EngineRecord(id="bound"))
    await store.fleet.bind(claim.job_id, claim.token, "bound")
    await store.fleet.register_engine(EngineRecord(id="idle"))
    await functions.redis.hset(service_key("signs"), "engine", 10_000_000)
    await store.fleet.register_engine(EngineRecord(id="new"))
    assert [engine.id for engine in await store.fleet.engines()] == ["bound", "new"]


# The table of versions


async def test_the_parent_of_a_version_is_what_it_was_trained_from(store: Store, claim: Claim) -> None:
    job = claim.job_id
    for version, epoch, step in [(0, 1, 0), (1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (5, 2, 3)]:
        await store.versions.publish(job, claim.token, manifest(job, version, epoch=epoch, step=step))
    assert await store.versions.table(job) == [
        Version(0, 1, 0, None),
        Version(1, 1, 1, 0),
        Version(2, 1, 2, 1),
        Version(3, 1, 3, 2),
        Version(4, 2, 2, 2),
        Version(5, 2, 3, 4),
    ]
