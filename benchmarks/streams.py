"""What the queue's guarantees cost on the wire: ``python -m benchmarks.streams``.

Appends of 16 KiB segments through ``Bus.append`` (fenced, idempotent, indexed, counted) beside raw XADD of the same
payload, on the same server with the same durability, the same number of segments in turns, so that what the neighbours
on a shared machine do falls on both. One process drives all clients: it is a part of what is measured, on both sides.

Aims: at least 0.8 of raw XADD; beats under 10 % of the commands at 10,000 open episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gspo_core.types import Split
from services.state.client import RedisClient
from services.state.queue import Append, Bus
from services.state.queue_records import LeasedEpisode
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store

RESULTS = Path(__file__).with_name("results") / "streams.md"
PAYLOAD_BYTES = 16 * 1024
BATCH = 16
# Rounds are short, and each row has a server of its own: else the disk still writes what the row before left behind.
SEGMENTS_PER_ROUND = {"always": 512, "everysec": 1024}
EPISODES_PER_CLIENT = 64
LEASE_S = 30.0
AIM_OF_RAW, AIM_BEATS = 0.8, 0.1

PAGE = """# Appending segments, beside raw XADD

Written by `python -m benchmarks.streams`: {server} on a unix socket, append-only file; {machine}; Python {python}.
Segments of {payload:,} random bytes; {rounds} rounds of {sizes} segments, raw and ours in turns, on its own server
for each row; the median of the rounds, and the median of the rounds' ratios (aim: {aim}). Raw XADD in a batch is a
pipeline. What an append does beyond XADD: it checks token, attempt, index and digest, keeps the index and counts bytes,
and of the segments of a call all are stored or none.

Where a call of one segment loses, measured apart, once, on a quiet server: its function runs for about 100 us, of which
18 us are commands (16 bytes take as long as 16 KiB), and the client packs 25 arguments where XADD has 7 (25 us of CPU
against 9). Segments that are appended together share both, so workers should append what is ready in one call.

{table}

## Open episodes

10,000 episodes held by 4 workers:

{episodes}
"""


@dataclass
class Bench:
    redis: RedisClient
    url: str
    bus: Bus
    claim: Claim
    next_group: int = 0

    async def lease(self, worker: str, count: int) -> tuple[str, list[LeasedEpisode]]:
        """``count`` fresh episodes for a fresh lease of ``worker``."""
        job = self.claim.job_id
        for _ in range(0, count, 8):
            await self.bus.dispatch(job, self.claim.token, self.next_group, size=8, split=Split.TRAIN, task_index=0)
            self.next_group += 1
        token = await self.bus.join(worker)
        return token, await self.bus.lease(job, worker, token, count)

    async def clear(self) -> None:
        """What a round left goes, outside of its time."""
        job = self.claim.job_id
        await self.bus.commit(job, self.claim.token, 1, await self.bus.open_groups(job))
        await self.redis.delete("raw")


async def open_bench(server: RedisServer) -> Bench:
    redis = connect(server.url)
    await redis.flushall()
    store = Store(redis)
    await store.load_functions()
    await store.jobs.create("{}")
    claim = await store.jobs.claim("bench")
    assert claim is not None
    return Bench(redis, server.url, Bus(redis), claim)


async def timed(clients: Sequence[Callable[[], Awaitable[int]]], num_segments: int) -> float:
    """Segments per second until the clients together have appended so many."""
    started = time.perf_counter()
    left = num_segments

    async def drive(call: Callable[[], Awaitable[int]]) -> None:
        nonlocal left
        while left > 0:
            # In two steps: `left -= await ...` reads it before the wait, and the others' counts are lost.
            appended = await call()
            left -= appended

    await asyncio.gather(*map(drive, clients))
    return (num_segments - left) / (time.perf_counter() - started)


async def connected(url: str, count: int) -> list[RedisClient]:
    connections = [connect(url) for _ in range(count)]
    await asyncio.gather(*(one.ping() for one in connections))
    return connections


async def raw_round(bench: Bench, num_clients: int, batch: int, payload: bytes, num_segments: int) -> float:
    connections = await connected(bench.url, num_clients)

    def client(redis: RedisClient) -> Callable[[], Awaitable[int]]:
        async def call() -> int:
            if batch == 1:
                await redis.xadd("raw", {"s": "0:0:0", "d": payload})
                return 1
            async with redis.pipeline(transaction=False) as pipeline:
                for _ in range(batch):
                    pipeline.xadd("raw", {"s": "0:0:0", "d": payload})
                return len(await pipeline.execute())

        return call

    rate = await timed([client(one) for one in connections], num_segments)
    for one in connections:
        await one.aclose()
    return rate


async def bus_round(bench: Bench, num_clients: int, batch: int, payload: bytes, num_segments: int) -> float:
    connections = await connected(bench.url, num_clients)
    job = bench.claim.job_id

    def client(bus: Bus, token: str, leases: list[LeasedEpisode]) -> Callable[[], Awaitable[int]]:
        turn, index = 0, [0] * len(leases)

        async def call() -> int:
            nonlocal turn
            appends = []
            for _ in range(batch):
                place, turn = turn % len(leases), turn + 1
                appends.append(Append(leases[place].key, 0, index[place], payload, final=False, version=1))
                index[place] += 1
            await bus.append(job, token, appends)
            return batch

        return call

    calls = []
    for number, redis in enumerate(connections):
        token, leases = await bench.lease(f"worker-{number}", EPISODES_PER_CLIENT)
        calls.append(client(Bus(redis), token, leases))
    rate = await timed(calls, num_segments)
    for one in connections:
        await one.aclose()
    return rate


async def append_row(
    server: RedisServer, durability: str, num_clients: int, batch: int, num_rounds: int
) -> tuple[object, ...]:
    bench = await open_bench(server)
    await bench.redis.config_set("appendfsync", durability)
    payload, num_segments = os.urandom(PAYLOAD_BYTES), SEGMENTS_PER_ROUND[durability]
    raw, ours = [], []
    # The first round of each warms up.
    for _ in range(num_rounds + 1):
        raw.append(await raw_round(bench, num_clients, batch, payload, num_segments))
        await bench.clear()
        ours.append(await bus_round(bench, num_clients, batch, payload, num_segments))
        await bench.clear()
    await bench.redis.aclose()
    raw_rate, our_rate = statistics.median(raw[1:]), statistics.median(ours[1:])
    share = statistics.median(one / other for one, other in zip(ours[1:], raw[1:], strict=True))
    row = (
        *(durability, num_clients, batch, f"{raw_rate:,.0f}", f"{our_rate:,.0f}"),
        *(f"{raw_rate * PAYLOAD_BYTES / 2**20:,.1f}", f"{our_rate * PAYLOAD_BYTES / 2**20:,.1f}"),
        *(f"{share:.2f}", "yes" if share >= AIM_OF_RAW else "no"),
    )
    print(*row, sep="\t", flush=True)
    return row


@dataclass
class Counting:
    """Counts the commands that a client sends."""

    redis: Any
    commands: Counter[str] = field(default_factory=Counter)

    def install(self) -> None:
        send = self.redis.execute_command

        async def execute_command(*args: Any, **options: Any) -> Any:
            self.commands[args[1] if args[0] == "FCALL" else args[0]] += 1
            return await send(*args, **options)

        self.redis.execute_command = execute_command


async def open_episodes(bench: Bench, num_episodes: int, num_workers: int) -> list[str]:
    """Memory of ``num_episodes`` that are leased, then the commands of one lease period: all appends, all beats."""
    job, lines = bench.claim.job_id, []
    await bench.clear()
    empty = int((await bench.redis.info("memory"))["used_memory"])
    held = [await bench.lease(f"worker-{number}", num_episodes // num_workers) for number in range(num_workers)]
    opened = int((await bench.redis.info("memory"))["used_memory"])
    payload = os.urandom(PAYLOAD_BYTES)
    counting = Counting(connect(bench.url))
    counting.install()
    bus = Bus(counting.redis, lease_s=LEASE_S)
    for number, (token, leases) in enumerate(held):
        for first in range(0, len(leases), BATCH):
            some = leases[first : first + BATCH]
            await bus.append(job, token, [Append(one.key, 0, 0, payload, final=False, version=1) for one in some])
        for _ in range(5):
            await bus.beat(f"worker-{number}", token)
            await bus.reap(job)
    filled = int((await bench.redis.info("memory"))["used_memory"])
    await counting.redis.aclose()
    beats, appends = counting.commands["gspo_beat"], counting.commands["gspo_append"]
    watching = counting.commands.total() - beats - appends
    total = counting.commands.total()
    lines.append(f"- one open episode, nothing appended: {(opened - empty) / num_episodes:,.0f} bytes")
    lines.append(f"- one segment of {PAYLOAD_BYTES:,} bytes: {(filled - opened) / num_episodes:,.0f} bytes")
    lines.append(
        f"- in a lease of {LEASE_S:g} s, {num_workers} workers, one segment per episode, {BATCH} a call: "
        f"{appends} calls of append, {beats} beats = {beats / total:.1%} of the commands"
        f" (aim: under {AIM_BEATS:.0%}), {watching} commands to watch the beats of others = {watching / total:.1%}"
    )
    print(*lines, sep="\n", flush=True)
    await bench.clear()
    return lines


def fresh(work: Callable[[RedisServer], Awaitable[Any]]) -> Any:
    """The result of ``work`` on a server of its own."""

    async def run(server: RedisServer) -> Any:
        return await work(server)

    with tempfile.TemporaryDirectory() as folder, RedisServer.spawn(Path(folder)) as server:
        return asyncio.run(run(server))


async def server_name(server: RedisServer) -> str:
    async with connect(server.url) as redis:
        info = await redis.info("server")
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"


async def measure_open_episodes(server: RedisServer) -> list[str]:
    bench = await open_bench(server)
    lines = await open_episodes(bench, 10_000, 4)
    await bench.redis.aclose()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of each row (default: 9)")
    num_rounds = parser.parse_args().rounds
    rows = [
        fresh(partial(append_row, durability=durability, num_clients=clients, batch=batch, num_rounds=num_rounds))
        for durability in SEGMENTS_PER_ROUND
        for clients in (1, 8)
        for batch in (1, BATCH)
    ]
    head = ("appendfsync", "clients", "segments a call", "raw XADD /s", "Bus.append /s", "raw MiB/s", "MiB/s", "of raw")
    lines = ((*head, "aim kept"), ["---"] * (len(head) + 1), *rows)
    text = PAGE.format(
        server=fresh(server_name),
        machine=f"{platform.machine()}, {os.cpu_count()} cores shared with other work, load {os.getloadavg()[0]:.1f}",
        python=platform.python_version(),
        payload=PAYLOAD_BYTES,
        rounds=num_rounds,
        sizes=" and ".join(f"{count} ({name})" for name, count in SEGMENTS_PER_ROUND.items()),
        aim=AIM_OF_RAW,
        table="\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines),
        episodes="\n".join(fresh(measure_open_episodes)),
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
