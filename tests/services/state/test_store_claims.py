"""A job has one trainer: claims, beats, takeovers, and what a former owner can still do (nothing)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis

from gspo_core.types import Split
from gspo_core.versions import WeightFile, WeightsManifest
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.keys import BUS_KEYS, job_key, service_key
from services.state.queue import Append, Bus, Fenced
from services.state.store import Claim, Store

if TYPE_CHECKING:
    from tests.services.conftest import LossyProxy

pytestmark = pytest.mark.every_server

LEASE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def claim_after_a_lease(store: Store, clock: Clock, trainer: str = "heir") -> Claim | None:
    """Ask as an idle trainer does, until a whole lease has been watched."""
    for _ in range(7):
        if claim := await store.jobs.claim(trainer):
            return claim
        clock.now += LEASE_S / 5 + 0.1
    return None


async def test_jobs_are_claimed_oldest_first_and_once(store: Store) -> None:
    jobs = [await store.jobs.create("{}", job_id=f"job_{number}") for number in range(3)]
    claims = [await store.jobs.claim("t") for _ in range(4)]
    assert [claim and claim.job_id for claim in claims] == [*(job.id for job in jobs), None]
    job = await store.jobs.get("job_0")
    assert (job.status, job.attempt, job.epoch) == ("starting", 1, 1)


async def test_trainers_that_claim_at_once_never_share_a_job(store: Store, new_client: Callable[[], Redis]) -> None:
    for number in range(8):
        await store.jobs.create("{}", job_id=f"job_{number}")
    stores = [Store(new_client()) for _ in range(6)]
    claims = await asyncio.gather(*(one.jobs.claim(f"t{number}") for number in range(3) for one in stores))
    got = [claim.job_id for claim in claims if claim]
    assert sorted(got) == [f"job_{number}" for number in range(8)]


async def test_a_trainer_that_beats_keeps_its_job(store: Store, claim: Claim, redis_client: Redis) -> None:
    clock = Clock()
    rival = Store(redis_client, lease_s=LEASE_S, clock=clock)
    for _ in range(20):
        clock.now += LEASE_S / 3
        assert await rival.jobs.claim("rival") is None
        await store.jobs.beat(claim.job_id, claim.token)


async def test_the_job_of_a_silent_trainer_starts_again_elsewhere(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    clock = Clock()
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    heir = await claim_after_a_lease(Store(redis_client, lease_s=LEASE_S, clock=clock), clock)
    assert heir is not None
    assert clock.now - 1000.0 >= LEASE_S
    assert (heir.job_id, heir.epoch, heir.attempt) == (claim.job_id, claim.epoch + 1, claim.attempt + 1)
    assert heir.token != claim.token
    job = await store.jobs.get(claim.job_id)
    assert (job.status, job.epoch, job.attempt) == ("starting", 2, 2)


@pytest.mark.parametrize(("status", "after"), [("pausing", "starting"), ("paused", "paused"), ("cancelling",) * 2])
async def test_a_takeover_does_not_undo_what_the_user_wants(
    store: Store, claim: Claim, redis_client: Redis, status: str, after: str
) -> None:
    clock = Clock()
    await redis_client.hset(job_key(claim.job_id, "job"), "status", status)
    heir = await claim_after_a_lease(Store(redis_client, lease_s=LEASE_S, clock=clock), clock)
    assert heir is not None
    assert (await store.jobs.get(claim.job_id)).status == after


async def test_a_job_that_is_to_stay_paused_needs_no_trainer(store: Store, claim: Claim, redis_client: Redis) -> None:
    clock = Clock()
    await store.jobs.set_desired_state(claim.job_id, "paused")
    await redis_client.hset(job_key(claim.job_id, "job"), "status", "paused")
    idle = Store(redis_client, lease_s=LEASE_S, clock=clock)
    assert await claim_after_a_lease(idle, clock) is None
    await store.jobs.set_desired_state(claim.job_id, "running")
    assert await idle.jobs.claim("heir") is not None


async def test_two_heirs_one_job(claim: Claim, new_client: Callable[[], Redis]) -> None:
    clock = Clock()
    heirs = [Store(new_client(), lease_s=LEASE_S, clock=clock) for _ in range(4)]
    claims: list[Claim | None] = []
    for _ in range(7):
        claims += await asyncio.gather(*(heir.jobs.claim("heir") for heir in heirs))
        clock.now += LEASE_S / 5 + 0.1
    assert len([one for one in claims if one]) == 1


def manifest(job: str, version: int, step: int = 0) -> WeightsManifest:
    return WeightsManifest(job, version, 1, step, (WeightFile("model.safetensors", 1, f"{version:064x}"),))


_WRITES: dict[str, Callable[[Store, Bus, str, str], Awaitable[object]]] = {
    "beat": lambda store, bus, job, token: store.jobs.beat(job, token),
    "status": lambda store, bus, job, token: store.jobs.set_status(job, "running", token=token),
    "progress": lambda store, bus, job, token: store.jobs.update_progress(job, token, 9, 9),
    "next version": lambda store, bus, job, token: store.versions.next(job, token),
    "publish": lambda store, bus, job, token: store.versions.publish(job, token, manifest(job, 0)),
    "epoch": lambda store, bus, job, token: store.jobs.raise_epoch(job, token, 9),
    "release": lambda store, bus, job, token: store.jobs.release(job, token),
    "bind": lambda store, bus, job, token: store.fleet.bind(job, token, "engine"),
    "dispatch": lambda store, bus, job, token: bus.dispatch(job, token, 0, size=1, split=Split.TRAIN, task_index=0),
    "commit": lambda store, bus, job, token: bus.commit(job, token, 1, [7]),
    "event": lambda store, bus, job, token: store.events.add(job, "step", {"step": 9}, token=token),
    "metrics": lambda store, bus, job, token: store.metrics.add(job, 9, {"reward/mean": 9.0}, token=token),
}


async def state_of(store: Store, bus: Bus, job: str) -> list[object]:
    return [
        await store.jobs.get(job),
        await bus.counters(job),
        await store.versions.all(job),
        await store.metrics.read(job),
        await store.events.read(job),
    ]


@pytest.mark.parametrize("write", _WRITES)
async def test_a_former_owner_can_change_nothing(
    store: Store, bus: Bus, claim: Claim, redis_client: Redis, write: str
) -> None:
    clock = Clock()
    job = claim.job_id
    heir = await claim_after_a_lease(Store(redis_client, lease_s=LEASE_S, clock=clock), clock)
    assert heir is not None
    await store.fleet.register_engine(EngineRecord(id="engine"))
    await bus.dispatch(job, heir.token, 7, size=1, split=Split.TRAIN, task_index=0)
    before = await state_of(store, bus, job)
    with pytest.raises(Fenced):
        await _WRITES[write](store, bus, job, claim.token)
    assert await state_of(store, bus, job) == before
    assert await store.fleet.engines() == [EngineRecord(id="engine", beats=1)]
    await _WRITES[write](store, bus, job, heir.token)


async def test_a_released_job_is_claimed_at_once(store: Store, claim: Claim) -> None:
    await store.jobs.release(claim.job_id, claim.token)
    await store.jobs.release(claim.job_id, claim.token)
    assert (await store.jobs.get(claim.job_id)).status == "queued"
    heir = await store.jobs.claim("heir")
    assert heir is not None
    assert (heir.job_id, heir.attempt, heir.epoch) == (claim.job_id, 2, 2)


async def test_a_running_job_that_is_released_starts_again(store: Store, claim: Claim) -> None:
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    await store.jobs.release(claim.job_id, claim.token)
    assert (await store.jobs.get(claim.job_id)).status == "running"
    assert await store.jobs.claim("heir") is not None
    assert (await store.jobs.get(claim.job_id)).status == "starting"


async def test_a_job_that_is_over_is_not_claimed_and_leaves_the_open_ones(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    await store.jobs.set_status(claim.job_id, "failed", token=claim.token)
    assert await store.jobs.claim("t") is None
    assert await redis_client.smembers(service_key("open_jobs")) == set()
    assert [job.id for job in await store.jobs.page()] == [claim.job_id]


async def test_a_claim_whose_reply_is_lost_is_still_ours(proxy: LossyProxy, lossy_client: Redis, store: Store) -> None:
    await store.jobs.create("{}")
    remote = Store(lossy_client)
    proxy.disturb(b"gspo_claim", lose_reply={0, 1})
    claim = await remote.jobs.claim("t")
    assert claim is not None
    assert (claim.epoch, claim.attempt) == (1, 1)
    await store.jobs.beat(claim.job_id, claim.token)
    assert len(await store.events.read(claim.job_id)) == 2


async def test_an_epoch_only_rises(store: Store, claim: Claim) -> None:
    assert await store.jobs.raise_epoch(claim.job_id, claim.token, 5) == 5
    assert await store.jobs.raise_epoch(claim.job_id, claim.token, 3) == 5
    await store.jobs.release(claim.job_id, claim.token)
    heir = await store.jobs.claim("heir")
    assert heir is not None
    assert heir.epoch == 6


async def test_progress_is_what_clients_see(store: Store, claim: Claim) -> None:
    await store.jobs.update_progress(claim.job_id, claim.token, 12, 13)
    job = await store.jobs.get(claim.job_id)
    assert (job.step, job.policy_version) == (12, 13)


async def lose_trainer(redis_client: Redis) -> Claim | None:
    """The owner is silent for a lease, and the next one tries."""
    clock = Clock()
    return await claim_after_a_lease(Store(redis_client, lease_s=LEASE_S, clock=clock), clock)


async def test_a_job_that_loses_trainer_after_trainer_without_a_step_has_failed(
    store: Store, bus: Bus, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    await bus.dispatch(job, claim.token, 0, size=2, split=Split.TRAIN, task_index=0)
    for attempt in (2, 3):
        heir = await lose_trainer(redis_client)
        assert heir is not None
        assert heir.attempt == attempt
    assert await lose_trainer(redis_client) is None
    record = await store.jobs.get(job)
    assert (record.status, record.status_reason and record.status_reason.code) == ("failed", "max_attempts_exceeded")
    assert await bus.counters(job) == {
        "dispatched": 1,
        "trained": 0,
        "evaluated": 0,
        "dropped_job_over": 1,
        "in_flight": 0,
    }
    with pytest.raises(Fenced):
        await store.jobs.beat(job, heir.token)


async def test_every_new_step_gives_a_job_all_its_attempts_again(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    owner: Claim | None = claim
    for step in range(6):
        assert owner is not None
        await store.jobs.update_progress(claim.job_id, owner.token, step, step)
        assert await lose_trainer(redis_client) is not None
        owner = await lose_trainer(redis_client)
    # the same step again is none
    for _ in range(2):
        assert owner is not None
        await store.jobs.update_progress(claim.job_id, owner.token, 5, 40)
        owner = await lose_trainer(redis_client)
    assert owner is None


async def test_steps_that_are_taken_again_after_a_job_went_back_count_as_new(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    await store.jobs.update_progress(job, claim.token, 60, 61)
    assert await store.jobs.raise_epoch(job, claim.token, claim.epoch + 1, goes_back=True) == claim.epoch + 1
    await store.jobs.release(job, claim.token)
    owner = await store.jobs.claim("heir")
    for step in (21, 22, 23, 24):
        assert owner is not None, (await store.jobs.get(job)).status_reason
        await store.jobs.update_progress(job, owner.token, step, step + 42)
        owner = await lose_trainer(redis_client)


async def test_who_leaves_in_an_orderly_way_costs_no_attempt(store: Store, claim: Claim) -> None:
    owner = claim
    for _ in range(8):
        await store.jobs.release(claim.job_id, owner.token)
        heir = await store.jobs.claim("t")
        assert heir is not None
        owner = heir


@pytest.mark.parametrize("status", ["paused", "cancelling"])
async def test_a_job_that_does_not_train_is_not_counted(
    store: Store, claim: Claim, redis_client: Redis, status: str
) -> None:
    await redis_client.hset(job_key(claim.job_id, "job"), "status", status)
    for _ in range(5):
        assert await lose_trainer(redis_client) is not None


async def test_the_queue_ends_with_its_job(store: Store, bus: Bus, claim: Claim, redis_client: Redis) -> None:
    job = claim.job_id
    for group in range(3):
        await bus.dispatch(job, claim.token, group, size=2, split=Split.TRAIN, task_index=0, bytes_per_episode=9)
    token = await bus.join("w")
    first, second, _ = await bus.lease(job, "w", token, 3)
    await bus.append(job, token, [Append(first.key, 0, 0, b"x", False), Append(second.key, 0, 0, b"y", True)])
    await bus.commit(job, claim.token, 1, [1])
    await store.jobs.set_status(job, "running", token=claim.token)
    for _ in range(2):  # sent again after a lost reply
        await store.jobs.set_status(job, "succeeded", token=claim.token)
    counts = await bus.counters(job)
    assert counts == {"dispatched": 3, "trained": 1, "evaluated": 0, "dropped_job_over": 2, "in_flight": 0}
    left = {name for name in BUS_KEYS if await redis_client.exists(job_key(job, name))}
    assert left == {"trainer", "counters", "meta"}
    usage = await bus.usage(job)
    assert (usage.charged_bytes, usage.stored_bytes) == (0, 0)
    with pytest.raises(Fenced):
        await bus.append(job, token, [Append(first.key, 0, 1, b"z", True)])
    assert await bus.reap(job) == 0


# Several jobs, and a trainer that dies


async def idle_for_a_while(store: Store, clock: Clock, seconds: float) -> list[Claim]:
    """Claims that an idle trainer got, asking as it does."""
    claims = []
    until = clock.now + seconds
    while clock.now < until:
        if claim := await store.jobs.claim("restarted", lost_first=True):
            claims.append(claim)
        clock.now += LEASE_S / 10
    return claims


async def test_a_trainer_that_starts_again_goes_on_with_what_it_had(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    clock = Clock()
    waiting = await store.jobs.create("{}")
    restarted = Store(redis_client, lease_s=LEASE_S, clock=clock)
    assert await idle_for_a_while(restarted, clock, LEASE_S) == [], "whether its first job is lost is not known yet"
    (got,) = await idle_for_a_while(restarted, clock, LEASE_S / 10)
    assert (got.job_id, got.epoch) == (claim.job_id, claim.epoch + 1)
    assert (await store.jobs.get(waiting.id)).attempt == 0


async def test_a_job_that_waits_is_had_as_soon_as_the_others_are_seen_alive(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    clock = Clock()
    waiting = await store.jobs.create("{}")
    new = Store(redis_client, lease_s=LEASE_S, clock=clock)
    assert await new.jobs.claim("new", lost_first=True) is None
    clock.now += LEASE_S / 10
    await store.jobs.beat(claim.job_id, claim.token)
    got = await new.jobs.claim("new", lost_first=True)
    assert got is not None
    assert got.job_id == waiting.id
    assert (await store.jobs.get(claim.job_id)).attempt == 1


async def test_a_busy_trainer_frees_what_a_lost_one_held(store: Store, claim: Claim, redis_client: Redis) -> None:
    clock = Clock()
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    await store.jobs.create("{}")
    busy = Store(redis_client, lease_s=LEASE_S, clock=clock)
    own = await busy.jobs.claim("busy")
    assert own is not None
    await store.fleet.register_engine(EngineRecord(id="e"))
    assert await store.fleet.bind(claim.job_id, claim.token, "e")
    await store.fleet.mark(claim.job_id, claim.token, "e", EngineReport(EngineState.READY))
    given_up = []
    for _ in range(12):
        given_up += await busy.jobs.give_up_lost(own.job_id)
        clock.now += LEASE_S / 10
    assert given_up == [claim.job_id]
    lost = await store.jobs.get(claim.job_id)
    assert (lost.status_reason.code, lost.attempts[-1].code) == ("trainer_lost",) * 2  # type: ignore[union-attr]
    (engine,) = await store.fleet.engines()
    assert (engine.job, engine.state) == (None, None)
    assert await busy.fleet.bind(own.job_id, own.token, "e")
    with pytest.raises(Fenced):
        await store.jobs.beat(claim.job_id, claim.token)
    assert (await store.jobs.claim("heir")).job_id == claim.job_id  # type: ignore[union-attr]


@pytest.mark.parametrize("status", ["paused", "cancelling"])
async def test_what_a_paused_or_cancelled_job_says_of_itself_stays(
    store: Store, claim: Claim, redis_client: Redis, status: str
) -> None:
    clock = Clock()
    await redis_client.hset(job_key(claim.job_id, "job"), "status", status)
    before = (await store.jobs.get(claim.job_id)).status_reason
    busy = Store(redis_client, lease_s=LEASE_S, clock=clock)
    for _ in range(12):
        await busy.jobs.give_up_lost("another")
        clock.now += LEASE_S / 10
    lost = await store.jobs.get(claim.job_id)
    assert (lost.status_reason, lost.attempts[-1].code) == (before, "trainer_lost")
    with pytest.raises(Fenced):
        await store.jobs.beat(claim.job_id, claim.token)


async def test_what_was_lost_comes_before_what_waits_whoever_noticed(
    store: Store, claim: Claim, redis_client: Redis
) -> None:
    """A busy trainer has watched for longer than the one that was just started again."""
    clock = Clock()
    lost = await store.jobs.create("{}", job_id="job_zzz")
    first = await store.jobs.claim("killed")
    assert first is not None
    assert first.job_id == lost.id
    await store.jobs.set_status(lost.id, "running", token=first.token)
    await store.jobs.create("{}", job_id="job_aaa")
    busy = Store(redis_client, lease_s=LEASE_S, clock=clock)
    for _ in range(12):
        await busy.jobs.give_up_lost(claim.job_id)
        clock.now += LEASE_S / 10
    await store.jobs.beat(claim.job_id, claim.token)
    restarted = Store(redis_client, lease_s=LEASE_S, clock=clock)
    got = await restarted.jobs.claim("restarted", lost_first=True)
    assert got is not None
    assert got.job_id == lost.id


async def test_a_job_that_ended_between_the_look_and_the_taking_stays_as_it_ended(
    store: Store, claim: Claim, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    busy = Store(redis_client, lease_s=LEASE_S, clock=clock)
    seen = busy.jobs._seen

    async def and_then_it_ends(job: str) -> object:
        found = await seen(job)
        if found is not None:
            await store.jobs.set_status(claim.job_id, "succeeded", token=claim.token)
        return found

    monkeypatch.setattr(busy.jobs, "_seen", and_then_it_ends)
    for _ in range(12):
        assert await busy.jobs.give_up_lost("another") == []
        clock.now += LEASE_S / 10
    ended = await store.jobs.get(claim.job_id)
    assert ended.status == "succeeded"
    assert ended.attempts[-1].code != "trainer_lost"


async def test_who_beats_is_not_given_up(store: Store, claim: Claim, redis_client: Redis) -> None:
    clock = Clock()
    busy = Store(redis_client, lease_s=LEASE_S, clock=clock)
    for _ in range(30):
        assert await busy.jobs.give_up_lost("another") == []
        clock.now += LEASE_S / 4
        await store.jobs.beat(claim.job_id, claim.token)


async def test_a_beat_between_the_look_and_the_taking_saves_the_job(
    store: Store, claim: Claim, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    busy = Store(redis_client, lease_s=LEASE_S, clock=clock)
    seen = busy.jobs._seen

    async def and_then_it_wakes(job: str) -> object:
        found = await seen(job)
        await store.jobs.beat(claim.job_id, claim.token)
        return found

    for _ in range(11):
        assert await busy.jobs.give_up_lost("another") == []
        clock.now += LEASE_S / 10 - 0.001
    clock.now += 0.1
    monkeypatch.setattr(busy.jobs, "_seen", and_then_it_wakes)
    assert await busy.jobs.give_up_lost("another") == []
    await store.jobs.beat(claim.job_id, claim.token)
