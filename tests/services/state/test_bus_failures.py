"""What the queue promises when replies are lost, servers and workers are killed, and zombies wake up."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gspo_core.types import EpisodeKey, Split
from services.state.client import Away
from services.state.functions import Functions
from services.state.keys import job_key, service_key, service_keys
from services.state.leases import BeatWatch
from services.state.queue import Append, Bus, Fenced
from services.state.server import RedisServer
from services.state.store import Claim

if TYPE_CHECKING:
    from tests.services.conftest import LossyProxy

pytestmark = pytest.mark.every_server

LEASE_S = 30.0


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def dispatch(bus: Bus, claim: Claim, group: int, size: int = 1) -> None:
    await bus.dispatch(claim.job_id, claim.token, group, size=size, split=Split.TRAIN, task_index=0)


def segment(key: EpisodeKey, index: int, *, final: bool = False) -> Append:
    return Append(key, 0, index, f"{key}:{index}".encode(), final)


async def payloads(bus: Bus, job: str) -> list[bytes]:
    return [payload for _, payload in await bus.read_segments(job, "0", count=10_000, block_ms=0)]


# Lost replies


async def test_a_bare_xadd_is_duplicated_by_a_lost_reply(proxy: LossyProxy, lossy_client: Redis) -> None:
    """The fault is real: this is what the functions are for."""
    proxy.disturb(b"XADD", lose_reply={2})
    for number in range(5):
        await lossy_client.xadd("stream", {"n": number})
    assert await lossy_client.xlen("stream") == 6


async def test_appends_whose_reply_is_lost_are_neither_lost_nor_doubled(
    proxy: LossyProxy, lossy_client: Redis, bus: Bus, claim: Claim
) -> None:
    job, remote = claim.job_id, Bus(lossy_client)
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    proxy.disturb(b"gspo_append", lose_reply={0, 1, 4, 9}, lose_request={3, 11})
    for index in range(10):
        await remote.append(job, token, [segment(lease.key, 2 * index), segment(lease.key, 2 * index + 1)])
    assert proxy.num_seen == 16
    assert await payloads(bus, job) == [segment(lease.key, index).payload for index in range(20)]


async def test_a_last_segment_whose_reply_is_lost_completes_the_group_once(
    proxy: LossyProxy, lossy_client: Redis, bus: Bus, claim: Claim
) -> None:
    job, remote = claim.job_id, Bus(lossy_client)
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    first, second = await bus.lease(job, "w", token, 2)
    proxy.disturb(b"gspo_append", lose_reply={0, 1, 3})
    await remote.append(job, token, [segment(first.key, 0, final=True)])
    assert await bus.ready_groups(job) == []
    await remote.append(job, token, [segment(second.key, 0, final=True)])
    assert len(await bus.ready_groups(job)) == 1
    assert len(await payloads(bus, job)) == 2


async def test_a_lease_whose_reply_is_lost_strands_no_episode(
    proxy: LossyProxy, lossy_client: Redis, bus: Bus, claim: Claim
) -> None:
    job, remote = claim.job_id, Bus(lossy_client)
    for group in range(6):
        await dispatch(bus, claim, group)
    token = await remote.join("w")
    proxy.disturb(b"gspo_lease", lose_reply={0})
    leases = await remote.lease(job, "w", token, 2)
    assert [lease.key.group for lease in leases] == [0, 1]
    assert [lease.key.group for lease in await remote.lease(job, "w", token, 2)] == [2, 3]


async def test_a_lease_that_failed_altogether_is_answered_by_the_next(
    proxy: LossyProxy, lossy_client: Redis, bus: Bus, claim: Claim
) -> None:
    job, remote = claim.job_id, Bus(lossy_client)
    for group in range(6):
        await dispatch(bus, claim, group)
    token = await remote.join("w")
    lossy_client.set_retry(Retry(NoBackoff(), 0))
    proxy.disturb(b"gspo_lease", lose_reply={0})
    with pytest.raises(Away):
        await remote.lease(job, "w", token, 2)
    assert [lease.key.group for lease in await remote.lease(job, "w", token, 4)] == [0, 1]
    assert [lease.key.group for lease in await remote.lease(job, "w", token, 4)] == [2, 3, 4, 5]


async def test_trainer_calls_whose_reply_is_lost_count_once(
    proxy: LossyProxy, lossy_client: Redis, bus: Bus, claim: Claim
) -> None:
    remote = Bus(lossy_client)
    proxy.disturb(b"gspo_dispatch", lose_reply={0, 2})
    for group in range(3):
        await dispatch(remote, claim, group, size=2)
    proxy.disturb(b"gspo_commit", lose_reply={0})
    await remote.commit(claim.job_id, claim.token, 1, [0, 1])
    assert await bus.counters(claim.job_id) == {"dispatched": 3, "trained": 2, "evaluated": 0, "in_flight": 1}
    token = await bus.join("w")
    assert len(await bus.lease(claim.job_id, "w", token, 10)) == 2


# Leases


def _bus_at(client: Redis, clock: Callable[[], float]) -> Bus:
    return Bus(client, lease_s=LEASE_S, clock=clock)


async def _pass_a_lease(bus: Bus, clock: Clock, job: str) -> int:
    """Reap as a worker does, every fifth of a lease, for a whole lease and a little; returns what came back."""
    count = 0
    for _ in range(6):
        clock.now += LEASE_S / 5 + 0.1
        count += await bus.reap(job)
    return count


async def test_the_episodes_of_a_silent_worker_go_to_another_and_it_is_fenced(
    redis_client: Redis, bus: Bus, claim: Claim
) -> None:
    job, clock = claim.job_id, Clock()
    reaper = _bus_at(redis_client, clock)
    for group in range(3):
        await dispatch(bus, claim, group)
    silent, other = await bus.join("silent"), await bus.join("other")
    first, second = await bus.lease(job, "silent", silent, 2)
    await bus.append(job, silent, [segment(first.key, 0), segment(first.key, 1)])
    assert await reaper.reap(job) == 0
    assert await _pass_a_lease(reaper, clock, job) == 2
    taken = await bus.lease(job, "other", other, 3)
    assert [(lease.key.group, lease.num_segments) for lease in taken] == [(0, 2), (1, 0), (2, 0)]
    # it wakes up
    with pytest.raises(Fenced):
        await bus.beat("silent", silent)
    with pytest.raises(Fenced):
        await bus.append(job, silent, [segment(first.key, 2)])
    with pytest.raises(Fenced):
        await bus.restart(second.key, silent, 1)
    await bus.hand_back(job, silent, [first.key, second.key])
    assert await bus.lease(job, "other", other, 3) == []
    assert len(await payloads(bus, job)) == 2


async def test_a_worker_that_beats_keeps_its_episodes(redis_client: Redis, bus: Bus, claim: Claim) -> None:
    job, clock = claim.job_id, Clock()
    reaper = _bus_at(redis_client, clock)
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    [lease] = await bus.lease(job, "w", token, 1)
    for _ in range(30):
        clock.now += LEASE_S / 3
        assert await reaper.reap(job) == 0
        await bus.beat("w", token)
    await bus.append(job, token, [segment(lease.key, 0, final=True)])


async def test_a_beat_between_the_look_and_the_takeover_saves_the_lease(redis_client: Redis, bus: Bus) -> None:
    functions = Functions(redis_client)
    token = await bus.join("w")
    [seen] = await redis_client.hmget(service_key("lease_beats"), ["w"])
    await bus.beat("w", token)
    assert await functions.call("end_lease", service_keys(), "w", token, seen) == 0
    await bus.beat("w", token)
    [seen] = await redis_client.hmget(service_key("lease_beats"), ["w"])
    assert await functions.call("end_lease", service_keys(), "w", "another token", seen) == 0
    assert await functions.call("end_lease", service_keys(), "w", token, seen) == 1
    with pytest.raises(Fenced):
        await bus.beat("w", token)


async def test_a_worker_that_joins_anew_gives_up_what_it_held(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0)
    before = await bus.join("w")
    [lease] = await bus.lease(job, "w", before, 1)
    now = await bus.join("w")
    with pytest.raises(Fenced):
        await bus.beat("w", before)
    assert await bus.reap(job) == 1
    assert [again.key for again in await bus.lease(job, "w", now, 1)] == [lease.key]


async def test_a_worker_that_leaves_is_not_waited_for(bus: Bus, claim: Claim) -> None:
    job = claim.job_id
    await dispatch(bus, claim, 0)
    token = await bus.join("w")
    await bus.lease(job, "w", token, 1)
    await bus.leave("w", token)
    assert await bus.reap(job) == 1


async def test_finished_episodes_do_not_come_back(redis_client: Redis, bus: Bus, claim: Claim) -> None:
    job, clock = claim.job_id, Clock()
    reaper = _bus_at(redis_client, clock)
    await dispatch(bus, claim, 0, size=2)
    token = await bus.join("w")
    done, _ = await bus.lease(job, "w", token, 2)
    await bus.append(job, token, [segment(done.key, 0, final=True)])
    await reaper.reap(job)
    assert await _pass_a_lease(reaper, clock, job) == 1
    assert await redis_client.zrange(job_key(job, "queue"), 0, -1) == [b"0:1"]


_LEASING_CHILD = """
import asyncio, sys
from services.state.queue import Append, Bus
from services.state.server import connect

async def main(url, job):
    client = connect(url)
    bus = Bus(client)
    token = await bus.join("child")
    leases = await bus.lease(job, "child", token, 3)
    await bus.append(job, token, [Append(leases[0].key, 0, 0, b"from the child", False)])
    print(len(leases), flush=True)
    while True:
        await bus.beat("child", token)
        await asyncio.sleep(0.05)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def leasing_child(redis_server: RedisServer, bus: Bus, claim: Claim) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that holds the three oldest of four episodes and beats."""
    for group in range(4):
        await dispatch(bus, claim, group)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LEASING_CHILD, redis_server.url, claim.job_id), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"3\n"
    yield child
    if child.returncode is None:
        child.kill()
    await child.communicate()


async def test_the_episodes_of_a_killed_worker_resume_elsewhere(
    redis_client: Redis, bus: Bus, claim: Claim, leasing_child: asyncio.subprocess.Process
) -> None:
    job, lease_s = claim.job_id, 3.0
    reaper = Bus(redis_client, lease_s=lease_s)
    token = await bus.join("w")

    async def reap_until(deadline: float) -> int:
        while (count := await reaper.reap(job)) == 0 and time.monotonic() < deadline:
            await asyncio.sleep(lease_s / 20)
        return count

    assert await reap_until(time.monotonic() + 2 * lease_s) == 0, "a living worker lost its episodes"
    leasing_child.kill()
    killed_at = time.monotonic()
    assert await reap_until(killed_at + lease_s + 30) == 3
    leases = await bus.lease(job, "w", token, 9)
    assert [(lease.key.group, lease.num_segments) for lease in leases] == [(0, 1), (1, 0), (2, 0), (3, 0)]
    assert await bus.read_episode(leases[0].key) == [b"from the child"]
    await bus.append(job, token, [segment(leases[0].key, 1, final=True)])


# The watch


def test_a_beat_stands_still_only_after_the_whole_patience() -> None:
    clock = Clock()
    watch = BeatWatch(10.0, clock)
    assert not watch.stands_still("w", 1)
    for _ in range(2):
        clock.now += 4.9
        assert not watch.stands_still("w", 1)
    clock.now += 0.3
    assert watch.stands_still("w", 1)
    assert not watch.stands_still("w", 2)
    assert not watch.stands_still("v", 1)


def test_a_watcher_that_looked_away_starts_anew() -> None:
    """After an outage of the server every beat is old, and nobody is dead for that."""
    clock = Clock()
    watch = BeatWatch(10.0, clock)
    assert not watch.stands_still("w", 1)
    clock.now += 60.0
    assert not watch.stands_still("w", 1)
    for _ in range(3):
        clock.now += 4.0
        still = watch.stands_still("w", 1)
    assert still
    watch.forget("w")
    assert not watch.stands_still("w", 1)
