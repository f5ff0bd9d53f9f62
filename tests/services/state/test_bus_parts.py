"""Worlds that are kept in parts, on a real server: added to at the same cost, read as one, gone with their episode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gspo_core.types import Split
from services.state.keys import bus_keys, job_key
from services.state.queue import Append, Bus, Fenced, Gap, Kept, LeasedEpisode, Snapshot
from services.state.queue_records import member_name
from services.state.store import Claim

pytestmark = pytest.mark.every_server


async def dispatch(bus: Bus, claim: Claim, group: int, size: int = 1) -> None:
    await bus.dispatch(claim.job_id, claim.token, group, size=size, split=Split.TRAIN, task_index=0)


def part(lease: LeasedEpisode, num_segments: int, data: bytes) -> Kept:
    return Kept(lease.key, Snapshot(0, num_segments, data), is_part=True)


async def test_parts_are_added_to_a_world_at_the_same_cost_however_many_there_are(bus: Bus, claim: Claim) -> None:
    """Also to a whole one, as an earlier release stored it; who does not know of parts is not given half a world."""
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [part(first, 0, b"p0"), Kept(second.key, Snapshot(0, 0, b"whole"))])
    assert await bus.read_snapshot(first.key) == Snapshot(0, 0, b"p0")
    call = [Append(first.key, 0, 0, b"x" * 10, False), part(first, 1, b"p1"), part(second, 0, b"s1")]
    for _ in range(2):  # the second one is a resend
        await bus.append(job, token, call)
    for number in range(2, 300):
        await bus.append(job, token, [part(first, 1, f"p{number}".encode())])
    names = tuple(f"p{number}".encode() for number in range(1, 300))
    assert await bus.read_snapshot(first.key) == Snapshot(0, 1, b"p0", names)
    assert await bus.read_snapshot(second.key) == Snapshot(0, 0, b"whole", (b"s1",))
    assert (await bus.usage(job)).stored_bytes == 10 + sum(map(len, names)) + 2 + 5 + 2
    old = await bus._functions.call("read_snapshot", bus_keys(job), member_name(second.key))
    assert old == [0, 0, b""]
    packed = await bus._redis.hget(job_key(job, "snapshots"), f"{member_name(first.key)}/299")
    assert len(packed) < 50


@pytest.mark.parametrize(
    "end", ["last segment", "restart", "commit", "erase", "whole", "saved", "reward", "unreadable"]
)
async def test_parts_are_gone_with_their_world(bus: Bus, claim: Claim, end: str) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    lease, _ = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [part(lease, 0, f"part {number}".encode()) for number in range(3)])
    last = Append(lease.key, 0, 0, b"end", True)
    left = 0
    match end:
        case "last segment":
            await bus.append(job, token, [Kept(lease.key, Snapshot(0, 0, b"whole")), part(lease, 0, b"more"), last])
        case "restart":
            await bus.restart(lease.key, token, 1)
        case "commit":
            await bus.commit(job, claim.token, 1, [0])
        case "erase":
            await bus.erase(lease.key)
        case "whole":
            await bus.append(job, token, [Kept(lease.key, Snapshot(0, 0, b"whole"))])
            assert await bus.read_snapshot(lease.key) == Snapshot(0, 0, b"whole")
            left = 1
        case "saved":
            await bus.save_snapshot(lease.key, token, Snapshot(0, 0, b"whole"))
            assert await bus.read_snapshot(lease.key) == Snapshot(0, 0, b"whole")
            left = 1
        case "reward":
            await bus.await_reward(token, last, b"kept", deadline=2.0)
        case "unreadable":
            await bus._redis.hset(job_key(job, "episodes"), member_name(lease.key), b"\xc1")
            with pytest.raises(Fenced):
                await bus.append(job, token, [part(lease, 0, b"more")])
    assert await bus._redis.hlen(job_key(job, "snapshots")) == left
    expected = {"last segment": 3, "whole": 5, "saved": 5, "reward": 7}
    assert (await bus.usage(job)).stored_bytes == expected.get(end, 0)


async def test_no_attempt_begins_with_a_world_of_parts(bus: Bus, claim: Claim) -> None:
    """Its place among the segments is that of its last part alone."""
    job = claim.job_id
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    (lease,) = await bus.lease(job, "w", token, 1)
    first = Append(lease.key, 0, 0, b"x", False)
    await bus.append(job, token, [part(lease, 0, b"a"), first, part(lease, 1, b"b")])
    with pytest.raises(Gap):
        await bus.restart(lease.key, token, 1, [replace(first, attempt=1)])


async def test_a_part_of_an_episode_that_is_not_ones_own_is_refused(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    (lease,) = await bus.lease(job, "w", token, 1)
    with pytest.raises(Fenced):
        await bus.append(job, "another", [part(lease, 0, b"a")])
    with pytest.raises(Gap):
        await bus.append(job, token, [part(lease, 1, b"a")])
    assert await bus.read_snapshot(lease.key) is None
