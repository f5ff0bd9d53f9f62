"""A worker that starts in the place of a dead one has its episodes at once, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from gspo_core.types import Split
from services.state.fleet_records import WorkerRecord
from services.state.keys import SERVICE_KEYS, service_key, service_keys
from services.state.queue import Append, Bus, Fenced, LeasedEpisode
from services.state.store import Claim, Store

pytestmark = pytest.mark.every_server

PLACE, NUM_EPISODES = "gateway/machine/boot/net/127.0.0.1:8020", 6


async def held_by(
    bus: Bus, claim: Claim, worker: str, token: str, versions: tuple[int, ...] = ()
) -> list[LeasedEpisode]:
    """Episodes of a new group; the first have a segment of these versions."""
    job = claim.job_id
    await bus.dispatch(job, claim.token, 0, size=NUM_EPISODES, split=Split.TRAIN, task_index=0)
    leases = await bus.lease(job, worker, token, NUM_EPISODES)
    for lease, version in zip(leases, versions, strict=False):
        await bus.append(job, token, [Append(lease.key, 0, 0, b"x", False, version=version)])
    return leases


async def test_the_successor_has_the_episodes_at_once_and_the_old_token_none(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    old = await bus.join_in_place("w-1", PLACE)
    leases = await held_by(bus, claim, "w-1", old.token, (5, 3))
    new = await bus.join_in_place("w-2", PLACE)
    assert (old.generation, new.generation) == (1, 2)
    assert await bus.reap(job) == NUM_EPISODES  # the first look, without any watching
    again = await bus.lease(job, "w-2", new.token, NUM_EPISODES)
    # As they always come back: those that hold tokens first, by their oldest version, then as they were dispatched.
    assert [one.key.member for one in again] == [1, 0, 2, 3, 4, 5]
    assert [one.num_failures for one in again] == [0] * NUM_EPISODES
    late = [
        lambda: bus.beat("w-1", old.token),
        lambda: bus.append(job, old.token, [Append(leases[0].key, 0, 1, b"late", True)]),
        lambda: bus.restart(leases[0].key, old.token, 1),
    ]
    for call in late:
        with pytest.raises(Fenced):
            await call()
    await bus.hand_back(job, old.token, [one.key for one in leases])
    await bus.fail(leases[0].key, old.token, "late")
    assert await bus.reap(job) == 0
    assert await bus.lease(job, "w-2", new.token, NUM_EPISODES) == []


async def test_who_lost_the_place_while_it_lived_goes_on_without_it(bus: Bus, claim: Claim) -> None:
    """Two that live, which no place allows: they do not take it from each other in turn."""
    old = await bus.join_in_place("w-1", PLACE)
    new = await bus.join_in_place("w-2", PLACE)
    woken = await bus.join_in_place("w-1", PLACE, old.generation)
    assert woken.generation == 0
    await bus.beat("w-1", woken.token)
    await bus.beat("w-2", new.token)
    third = await bus.join_in_place("w-3", PLACE)
    assert third.generation == 3
    await bus.beat("w-1", woken.token)  # it has no place any more, so nobody takes that from it
    with pytest.raises(Fenced):
        await bus.beat("w-2", new.token)


async def test_of_two_that_start_at_the_same_moment_one_has_the_place(
    bus: Bus, new_client: Callable[[], Redis], claim: Claim
) -> None:
    old = await bus.join_in_place("w-0", PLACE)
    await held_by(bus, claim, "w-0", old.token)
    buses = [Bus(new_client()) for _ in range(8)]
    joined = await asyncio.gather(*(one.join_in_place(f"r-{n}", PLACE) for n, one in enumerate(buses)))
    assert sorted(one.generation for one in joined) == list(range(2, 10))

    async def beats(number: int) -> bool:
        try:
            await buses[number].beat(f"r-{number}", joined[number].token)
        except Fenced:
            return False
        return True

    alive = [number for number in range(8) if await beats(number)]
    assert [joined[number].generation for number in alive] == [9]
    again = [await buses[n].join_in_place(f"r-{n}", PLACE, one.generation) for n, one in enumerate(joined)]
    assert [one.generation for one in again if one.generation] == [9]


async def test_a_lease_that_was_lost_is_begun_again_in_the_same_place(bus: Bus) -> None:
    first = await bus.join_in_place("w-1", PLACE)
    second = await bus.join_in_place("w-1", PLACE, first.generation)
    assert second.generation == first.generation
    with pytest.raises(Fenced):
        await bus.beat("w-1", first.token)
    await bus.beat("w-1", second.token)


async def test_a_wiped_server_takes_no_place_from_its_holder(bus: Bus, redis_client: Redis) -> None:
    zombie = await bus.join_in_place("w-1", PLACE)
    holder = await bus.join_in_place("w-2", PLACE)
    await redis_client.flushall()
    assert (await bus.join_in_place("w-1", PLACE, zombie.generation)).generation == zombie.generation
    back = await bus.join_in_place("w-2", PLACE, holder.generation)
    assert back.generation == holder.generation
    assert (await bus.join_in_place("w-1", PLACE, zombie.generation)).generation == 0
    await bus.beat("w-2", back.token)


async def test_whoever_leaves_leaves_its_place_and_is_no_predecessor(bus: Bus, redis_client: Redis) -> None:
    first = await bus.join_in_place("w-1", PLACE)
    await bus.leave("w-1", first.token)
    assert await redis_client.exists(service_key("places"), service_key("placed")) == 0
    assert (await bus.join_in_place("w-2", PLACE)).generation == 1
    await bus.leave("w-1", first.token)
    assert await redis_client.hkeys(service_key("places")) == [PLACE.encode()]


async def test_the_dead_predecessor_is_listed_no_more_and_nobody_else_is_touched(bus: Bus, store: Store) -> None:
    old = await bus.join_in_place("w-1", PLACE)
    other, plain = await bus.join_in_place("v-1", "elsewhere"), await bus.join("u-1")
    for name in ("w-1", "v-1", "u-1"):
        await store.fleet.register_worker(
            WorkerRecord(id=name, host="h", pid=1, kind="gateway", address=f"http://{name}")
        )
    await bus.join_in_place("w-2", PLACE)
    assert sorted(one.id for one in await store.fleet.workers()) == ["u-1", "v-1"]
    await bus.beat("v-1", other.token)
    await bus.beat("u-1", plain)
    with pytest.raises(Fenced):
        await bus.beat("w-1", old.token)


async def test_workers_of_an_earlier_release_join_as_ever(bus: Bus, claim: Claim, redis_client: Redis) -> None:
    """They name fewer keys and no place; nobody takes their episodes before their lease is over."""
    keys = service_keys()[: SERVICE_KEYS.index("places")]
    assert await redis_client.fcall("gspo_join", len(keys), *keys, "w-1", "theirs") == 1
    await held_by(bus, claim, "w-1", "theirs")
    mine = await bus.join_in_place("w-2", PLACE)
    assert mine.generation == 1
    assert await bus.reap(claim.job_id) == 0
    assert await redis_client.fcall("gspo_beat", len(keys), *keys, "w-1", "theirs") == 1
    assert await redis_client.fcall("gspo_end_lease", len(keys), *keys, "w-1", "theirs", "") == 1
    assert await bus.reap(claim.job_id) == NUM_EPISODES


async def test_a_name_that_starts_elsewhere_leaves_no_place_behind(bus: Bus, redis_client: Redis) -> None:
    for number in range(5):
        assert (await bus.join_in_place("w-1", f"{PLACE}/{number}")).generation == 1
    assert await redis_client.hlen(service_key("places")) == 1
    assert await redis_client.hlen(service_key("placed")) == 1
