"""Engines come and go under a running job: is any token lost, and how soon is each one used? 1, 8, 2 and 1 again.

Run: ``python -m benchmarks.elastic_fleet [--rounds 20]``. A real Redis, a real pool of engines of a job that publishes
a version every two seconds, and the table and router of a rollout worker with callers, all in this process; the engines
are scripted. Each comes as `announce` lists it and leaves as `announce --drain-within` does, then it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from benchmarks.engine_watch import Client, write_model
from services.engines.protocol import info_calls
from services.episodes.metering import Counters
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.engine_beats import ANSWER_S, EngineBeats
from services.state.engine_leaving import drain
from services.state.engine_sightings import EngineSightings
from services.state.heard_engines import HeardEngines
from services.state.queue import Bus
from services.state.retry import Retrier
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store
from services.trainer.fleet.engines import EnginePool
from services.workers.engines import EngineTable, JobEngines
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport

RESULTS = Path(__file__).parent / "results" / "elastic_fleet.md"
NUM_CALLERS, NUM_TOKENS, TICK_S = 24, 40, 0.01
PUBLISH_S, DRAIN_S, USED_S = 2.0, 30.0, 60.0


@dataclass
class Seen:
    """What the callers saw."""

    first: dict[str, float] = field(default_factory=dict)
    """Engine -> when it first answered since it came."""
    num_answers: int = 0
    num_short: int = 0
    """Answers with fewer tokens than were asked for."""
    num_failed: int = 0


@dataclass
class Fleet:
    store: Store
    transport: ScriptedTransport
    http: httpx.AsyncClient
    model: Path
    tasks: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)

    def client(self, url: str) -> Client:
        made = Client(url, self.http)
        made.engine = self.transport.engines[url[7:]]
        return made

    def start(self, name: str) -> ScriptedEngine:
        self.transport.engines[name] = engine = ScriptedEngine(self.model, tick_s=TICK_S)
        self.tasks[name] = [asyncio.create_task(engine.run())]
        return engine

    def announce(self, name: str) -> None:
        self.start(name)
        beats = EngineBeats(self.store.fleet, info_calls([self.client(f"http://{name}")], ANSWER_S), lease_s=30.0)
        self.tasks[name].append(asyncio.create_task(beats.run()))

    async def leave(self, name: str) -> int:
        """Tokens that it was sampling when it ended."""
        url = f"http://{name}"
        await drain(self.store.fleet, [url], DRAIN_S)
        running, beating = self.tasks.pop(name)
        beating.cancel()
        await self.store.fleet.remove_engine(url)
        load = await self.client(url).load()
        self.transport.engines[name].kill()
        running.cancel()
        return load.num_running + load.num_waiting


async def call(router: JobEngines, number: int, seen: Seen) -> None:
    rng = random.Random(number)
    while True:
        ids = [rng.randrange(200) for _ in range(20)]
        try:
            sampled = await router.sample(ids, max_new_tokens=NUM_TOKENS, temperature=1.0, stop_token_ids=[])
        except Exception:
            seen.num_failed += 1
            raise
        seen.num_answers += 1
        seen.num_short += len(sampled.ids) != NUM_TOKENS
        seen.first.setdefault(sampled.engine_id, time.perf_counter())


async def publish(pool: EnginePool, weights: WeightStore, claim: Claim, store: Store) -> None:
    for version in range(2**30):
        manifest = weights.write(version, claim.epoch, version, write_model)
        await store.versions.publish(claim.job_id, claim.token, manifest)
        await pool.publish(manifest)
        await pool.wait_for(manifest)
        await asyncio.sleep(PUBLISH_S)


async def measure(root: Path, redis_url: str, rounds: int) -> str:
    write_model(root / "first")
    transport, seen = ScriptedTransport({}), Seen()
    async with (
        connect(redis_url) as redis,
        httpx.AsyncClient(transport=transport) as http,
        contextlib.AsyncExitStack() as stack,
    ):
        await Bus(redis).load_functions()
        store = Store(redis)
        await store.jobs.create('{"name": "elastic"}')
        claim = await store.jobs.claim("trainer")
        assert claim is not None
        fleet = Fleet(store, transport, http, root / "first")
        fleet.start("engine-0")
        heard = HeardEngines(EngineSightings(store.functions, time.monotonic), time.monotonic)
        weights, static = WeightStore(JobDir(root / claim.job_id)), ["http://engine-0"]
        pool = EnginePool(store, claim.job_id, claim.token, weights, static, fleet.client, heard=heard)
        retrier = Retrier(counters := Counters(), random.Random(0))
        sightings = EngineSightings(store.functions, time.monotonic)
        table = EngineTable(store.fleet, static, fleet.client, time.monotonic, retrier, sightings=sightings)
        router = JobEngines(
            table,
            store.versions,
            claim.job_id,
            max_staleness=10**6,
            vocab_size=fleet.transport.engines["engine-0"].vocab_size,
            retrier=retrier,
            counters=counters,
            clock=time.monotonic,
            leaving=asyncio.Event(),
        )
        works: list[Coroutine[Any, Any, None]] = [pool.run(), publish(pool, weights, claim, store)]
        works += [table.watch(), router.watch(), *(call(router, number, seen) for number in range(NUM_CALLERS))]
        tasks = [asyncio.create_task(work) for work in works]
        for task in tasks:
            stack.callback(task.cancel)
        joins, left, busy = await play(fleet, seen, rounds, tasks)
        costs = pool.metrics()
    return (
        f"| {rounds} | {len(joins)} | {statistics.median(joins):.2f} | {sorted(joins)[int(0.95 * len(joins))]:.2f} "
        f"| {max(joins):.2f} | {statistics.median(left):.2f} | {max(left):.2f} | {seen.num_answers} | {seen.num_short} "
        f"| {busy} | {costs['engine/tokens_lost']:.0f} |"
    )


async def play(
    fleet: Fleet, seen: Seen, rounds: int, tasks: Sequence[asyncio.Task[None]]
) -> tuple[list[float], list[float], int]:
    """Seconds until each engine that came had answered, seconds until each that left was given back, and requests that
    were in one when it ended."""
    joins: list[float] = []
    left: list[float] = []
    busy = 0

    async def leaves(name: str) -> int:
        began = time.perf_counter()
        num = await fleet.leave(name)
        left.append(time.perf_counter() - began)
        return num

    for number in range(rounds):
        came = {f"engine-{number}-{index}": time.perf_counter() for index in range(1, 8)}
        for name in came:
            fleet.announce(name)
        async with asyncio.timeout(USED_S):
            while not all(f"http://{name}" in seen.first for name in came):
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)
        joins += [seen.first[f"http://{name}"] - at for name, at in came.items()]
        *most, last = came
        busy += sum(await asyncio.gather(*(leaves(name) for name in most)))
        busy += await leaves(last)
        print(f"round {number + 1}: slowest {max(joins[-7:]):.2f} s", flush=True)
    return joins, left, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with TemporaryDirectory() as folder, RedisServer.start(Path(folder) / "redis") as redis:
        row = asyncio.run(measure(Path(folder), redis.url, arguments.rounds))
    print(row)
    RESULTS.write_text(
        "# Engines that come and go\n\n"
        f"`python -m benchmarks.elastic_fleet`: 1, 8, 2 and 1 engines, again and again, under a job with {NUM_CALLERS} "
        f"requests of {NUM_TOKENS} tokens at a time and a version every {PUBLISH_S:g} s. Scripted engines, a real "
        f"Redis, pool, table and router in one process on one of {os.cpu_count()} shared logical CPUs (load average "
        f"{load:.0f} at the start). A join is used when a request that it sampled was answered; an engine has left "
        "when its job gave it back. Short answers have fewer tokens than were asked for.\n\n"
        "| rounds | joins | used after, median s | 95 of 100 | slowest | left after, median s | slowest | answers "
        "| short ones | requests in an engine that ended | tokens lost |\n"
        f"|---|---|---|---|---|---|---|---|---|---|---|\n{row}\n"
    )


if __name__ == "__main__":
    main()
