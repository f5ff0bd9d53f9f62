"""Lines that break at random and servers that are killed under load: nothing acknowledged is lost or doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.types import EpisodeKey, Split
from services.state.queue import Append, Bus, LeasedEpisode
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store
from tests.services.state.faults import FAULTS, FaultyLine, MortalServer, until

pytestmark = pytest.mark.every_server

NUM_WORKERS = 8


def payload(key: EpisodeKey, index: int, size: int = 0) -> bytes:
    return f"{key}:{index}:".encode() + bytes(size)


def place(data: bytes) -> tuple[str, int]:
    key, index, _ = data.split(b":", 2)
    return key.decode(), int(index)


def assert_in_order(held: Sequence[bytes], num_episodes: int, num_segments: int) -> None:
    """Exactly the segments 0 .. num_segments - 1 of every episode, each once and in this order."""
    by_episode: dict[str, list[int]] = {}
    for data in held:
        key, index = place(data)
        by_episode.setdefault(key, []).append(index)
    assert len(held) == num_episodes * num_segments, f"{len(held)} segments instead of {num_episodes * num_segments}"
    assert all(indexes == list(range(num_segments)) for indexes in by_episode.values())


async def read_all(bus: Bus, job: str) -> list[bytes]:
    found: list[bytes] = []
    after = "0"
    while some := await bus.read_segments(job, after, count=1000, block_ms=0):
        found += [data for _, data in some]
        after = some[-1][0]
    return found


async def append_through_faults(
    redis_server: RedisServer, bus: Bus, claim: Claim, num_appends: int, *, seed: int, rate: float = 0.03
) -> FaultyLine:
    """Eight workers play one episode each, every call over a line that breaks; the books must agree at the end.

    The reply to the first append is lost for sure, however it is appended.
    """
    job, num_segments = claim.job_id, num_appends // NUM_WORKERS
    async with (
        FaultyLine(redis_server.url, rate, seed, surely=(b"gspo_append", b"XADD")) as line,
        AsyncExitStack() as opened,
    ):
        clients = [await opened.enter_async_context(connect(line.url)) for _ in range(NUM_WORKERS + 2)]
        trainer, reader = Bus(clients[-1]), Bus(clients[-2])
        for group in range(NUM_WORKERS):
            await trainer.dispatch(job, claim.token, group, size=1, split=Split.TRAIN, task_index=0)
        incoming: list[bytes] = []

        async def play(number: int) -> None:
            mine, name = Bus(clients[number]), f"w{number}"
            token = await mine.join(name)
            [lease] = await mine.lease(job, name, token, 1)
            for index in range(num_segments):
                final = index == num_segments - 1
                await mine.append(job, token, [Append(lease.key, 0, index, payload(lease.key, index), final)])
                if index % 50 == 0:
                    await mine.beat(name, token)

        async def read() -> None:
            after = "0"
            while len(incoming) < num_segments * NUM_WORKERS:
                some = await reader.read_segments(job, after, block_ms=50)
                incoming.extend(data for _, data in some)
                after = some[-1][0] if some else after

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            for number in range(NUM_WORKERS):
                tasks.create_task(play(number))
        assert_in_order(await read_all(bus, job), NUM_WORKERS, num_segments)
        assert_in_order(incoming, NUM_WORKERS, num_segments)
        ready = [one.group for one in await trainer.ready_groups(job)]
        assert sorted(ready) == list(range(NUM_WORKERS))
        await trainer.commit(job, claim.token, 1, ready)
    counts = await bus.counters(job)
    assert counts == {"dispatched": NUM_WORKERS, "trained": NUM_WORKERS, "evaluated": 0, "in_flight": 0}
    assert await read_all(bus, job) == []
    return line


@pytest.mark.parametrize("num_appends", [2_000, pytest.param(10_000, marks=[pytest.mark.slow])])
async def test_every_append_over_a_line_that_breaks_arrives_once_and_in_order(
    redis_server: RedisServer, bus: Bus, claim: Claim, num_appends: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = await append_through_faults(redis_server, bus, claim, num_appends, seed=num_appends)
    assert all(line.counts[fault] > num_appends / 400 for fault in FAULTS), line.counts
    with capsys.disabled():
        print(
            f"\n{num_appends} appends in order over {sum(line.counts[fault] for fault in FAULTS)} faults", line.counts
        )


@asynccontextmanager
async def eight_leases(server: MortalServer) -> AsyncIterator[tuple[Redis, Bus, Claim, str, list[LeasedEpisode]]]:
    async with connect(server.url) as client:
        bus, store = Bus(client), Store(client)
        await bus.load_functions()
        await store.jobs.create("{}")
        claim = await store.jobs.claim("trainer")
        assert claim is not None
        await bus.dispatch(claim.job_id, claim.token, 0, size=NUM_WORKERS, split=Split.TRAIN, task_index=0)
        token = await bus.join("w")
        yield client, bus, claim, token, await bus.lease(claim.job_id, "w", token, NUM_WORKERS)


@pytest.mark.parametrize("num_kills", [4, pytest.param(20, marks=[pytest.mark.slow])])
async def test_no_acknowledged_segment_is_lost_however_often_the_server_is_killed(
    server_binary: Path, tmp_path: Path, num_kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its clients are told nothing: what had no answer is sent again, by the client library or by the writer."""
    server = MortalServer(tmp_path, server_binary)
    chance = random.Random(num_kills)
    acknowledged: list[bytes] = []
    recoveries: list[float] = []
    over = False
    try:
        async with eight_leases(server) as (_, bus, claim, token, leases):

            async def write(lease: LeasedEpisode) -> None:
                index = 0
                while not over:
                    data = payload(lease.key, index, 4000)
                    await bus.append(claim.job_id, token, [Append(lease.key, 0, index, data, False)])
                    acknowledged.append(data)
                    index += 1

            async with asyncio.TaskGroup() as writers:
                for lease in leases:
                    writers.create_task(write(lease))
                for _ in range(num_kills):
                    target = len(acknowledged) + chance.randint(20, 200)
                    await until(lambda target=target: len(acknowledged) >= target)
                    recoveries.append(await server.kill_and_restart())
                target = len(acknowledged) + 50
                await until(lambda: len(acknowledged) >= target)
                over = True
            held = await read_all(bus, claim.job_id)
    finally:
        server.close()
    assert len(recoveries) == num_kills
    assert len(held) == len(set(held))
    assert set(held) == set(acknowledged)
    for lease in leases:
        mine = [index for key, index in map(place, held) if key == str(lease.key)]
        assert mine == list(range(len(mine)))
    with capsys.disabled():
        print(
            f"\n{num_kills} kills, {len(acknowledged)} acknowledged segments, 0 lost; recovery "
            f"{min(recoveries):.2f} to {max(recoveries):.2f} s, mean {sum(recoveries) / num_kills:.2f} s"
        )
