"""Records of the queue that an older release wrote, or that cannot be read.

The latter cost one episode, or the queue of one job, which its trainer empties; never a worker.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gspo_core.types import EpisodeKey, Split
from services.state.keys import job_key
from services.state.queue import Append, Bus, Fenced, LeasedEpisode, Stage
from services.state.refusals import Damaged
from services.state.store import Claim

pytestmark = pytest.mark.every_server
GARBAGE = [b"", b"\xc1", b"\x93\x01", b"not packed at all", b"\x80", msgspec.msgpack.encode({"attempt": "one"})]
ADDED_LATER = ("v", "deaths", "failures", "furthest")


async def dispatch(bus: Bus, claim: Claim, group: int = 0, size: int = 2) -> None:
    await bus.dispatch(claim.job_id, claim.token, group, size=size, split=Split.TRAIN, task_index=group)


def segment(lease: LeasedEpisode, index: int, *, final: bool = False) -> Append:
    return Append(lease.key, lease.attempt, index, f"{lease.key}:{index}".encode(), final)


async def damage(redis: Redis, claim: Claim, table: str, field: str, value: bytes) -> None:
    assert await redis.hexists(job_key(claim.job_id, table), field)
    await redis.hset(job_key(claim.job_id, table), field, value)


async def make_old(redis: Redis, claim: Claim, episode: str) -> None:
    """As a release wrote it that had neither numbers nor these counters."""
    key = job_key(claim.job_id, "episodes")
    record = msgspec.msgpack.decode(await redis.hget(key, episode))
    await redis.hset(key, episode, msgspec.msgpack.encode({k: v for k, v in record.items() if k not in ADDED_LATER}))


async def test_episodes_of_an_older_release_are_taken_from_dead_workers_and_finished(
    bus: Bus, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    await dispatch(bus, claim)
    dead = await bus.join("w")
    leases = await bus.lease(job, "w", dead, 2)
    await bus.append(job, dead, [segment(leases[0], 0)])
    for member in (0, 1):
        await make_old(redis_client, claim, f"0:{member}")
    token = await bus.join("w")  # it died and came back
    assert await bus.reap(job) == 2
    again = await bus.lease(job, "w", token, 2)
    assert sorted((lease.key.member, lease.num_segments) for lease in again) == [(0, 1), (1, 0)]
    await bus.append(job, token, [segment(lease, lease.num_segments, final=True) for lease in again])
    assert [group.group for group in await bus.ready_groups(job)] == [0]


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_an_unreadable_episode_is_one_dead_letter_and_its_group_goes_on(
    bus: Bus, claim: Claim, redis_client: Redis, garbage: bytes
) -> None:
    job = claim.job_id
    await dispatch(bus, claim)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [segment(first, 0), segment(second, 0)])
    await damage(redis_client, claim, "episodes", "0:0", garbage)
    assert [view.stage for view in (await bus.groups(job))[0].episodes] == [
        Stage.DEAD,
        Stage.HELD,
    ]  # looking changes nothing
    with pytest.raises(Fenced):
        await bus.append(job, token, [segment(first, 1, final=True)])
    await bus.append(job, token, [segment(second, 1, final=True)])
    (letter,) = await bus.dead_letters(job)
    assert (letter.key, "cannot be read" in letter.reason) == (EpisodeKey(job, 0, 0), True)
    (ready,) = await bus.ready_groups(job)
    assert (ready.group, ready.dead) == (0, (0,))
    await bus.commit(job, claim.token, 1, [0])
    usage = await bus.usage(job)
    assert (usage.charged_bytes, usage.stored_bytes) == (0, 0)


async def test_an_unreadable_episode_that_waits_or_is_requeued_ends_no_worker(
    bus: Bus, claim: Claim, redis_client: Redis
) -> None:
    job = claim.job_id
    await dispatch(bus, claim, size=3)
    dead = await bus.join("w")
    await bus.lease(job, "w", dead, 1)
    for episode in ("0:0", "0:1"):  # held by a worker that dies, and waiting
        await damage(redis_client, claim, "episodes", episode, b"\xc1")
    token = await bus.join("w")
    await bus.reap(job)
    leases = await bus.lease(job, "w", token, 10)
    assert [lease.key.member for lease in leases] == [2]
    await bus.append(job, token, [segment(leases[0], 0, final=True)])
    (ready,) = await bus.ready_groups(job)
    assert sorted(ready.dead) == [0, 1]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("table", ["groups", "holders"])
async def test_what_else_cannot_be_read_is_said_and_the_queue_can_be_emptied(
    bus: Bus, claim: Claim, redis_client: Redis, table: str, garbage: bytes
) -> None:
    job = claim.job_id
    await dispatch(bus, claim)
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 1)
    await damage(redis_client, claim, table, "0" if table == "groups" else token, garbage)
    if table == "groups":
        with pytest.raises(Damaged, match="group 0"):
            await bus.append(job, token, [segment(leases[0], 0, final=True)])
        # Its trainer has no reason to read the record of a group that is not complete.
        with pytest.raises(Damaged, match="group 0"):
            await bus.ready_groups(job)
        assert await bus.empty_queue(job, claim.token) == 1
        assert await bus.ready_groups(job) == []
        await dispatch(bus, claim)
    else:
        assert await bus.reap(job) == 1  # as if its worker were dead
    again = await bus.lease(job, "w", await bus.join("w"), 10)
    assert len(again) == 2
    counters = await bus.counters(job)
    assert counters.pop("dispatched") == sum(counters.values())


async def test_only_the_trainer_of_the_job_empties_its_queue(bus: Bus, claim: Claim) -> None:
    await dispatch(bus, claim)
    with pytest.raises(Fenced):
        await bus.empty_queue(claim.job_id, "another token")
    assert len(await bus.groups(claim.job_id)) == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    table=st.sampled_from(["episodes", "groups", "holders", "index", "snapshots"]),
    garbage=st.binary(max_size=40),
    cut=st.booleans(),
)
async def test_no_garbage_is_anything_but_a_refusal(
    bus: Bus, claim: Claim, redis_client: Redis, table: str, garbage: bytes, cut: bool
) -> None:
    """Every call answers or refuses; an emptied queue serves again."""
    job = claim.job_id
    await bus.empty_queue(job, claim.token)
    await dispatch(bus, claim)
    token = await bus.join("w")
    leases = await bus.lease(job, "w", token, 1)
    await bus.append(job, token, [segment(leases[0], 0)])
    key = job_key(job, table)
    for field, value in (await redis_client.hgetall(key)).items():
        await redis_client.hset(key, field, value[: len(value) // 2] if cut else garbage)
    calls: list[Any] = [
        lambda: bus.lease(job, "w", token, 10),
        lambda: bus.append(job, token, [segment(leases[0], 1, final=True)]),
        lambda: bus.read_episode(leases[0].key),
        lambda: bus.hand_back(job, token, [leases[0].key]),
        lambda: bus.fail(leases[0].key, token, "no"),
        lambda: bus.groups(job),
        lambda: bus.ready_groups(job),
        lambda: bus.reap(job),
        lambda: bus.cancel(job, claim.token, 0),
        lambda: bus.commit(job, claim.token, 1, [0]),
    ]
    for call in calls:
        try:
            await call()
        except (Damaged, Fenced):
            continue
    await bus.empty_queue(job, claim.token)
    await dispatch(bus, claim)
    assert len(await bus.lease(job, "w", await bus.join("w"), 10)) == 2
