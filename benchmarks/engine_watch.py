"""What does watching engines cost them, and how soon do workers know? One process for all, and each for itself.

Run: ``python -m benchmarks.engine_watch [--workers 64] [--engines 16]``. A real Redis, scripted engines in this
process, and as many tables of engines as there would be worker processes, all in one event loop: with many of them,
what one core can do bounds what is measured. A switch is an engine that names new weights, and its
trainer's report right after it; an end is an engine that refuses connections from then on; a change nobody reports is
new weights that no trainer knows of.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from services.engines.protocol import info_calls
from services.engines.sglang import EngineClient
from services.episodes.metering import Counters
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.engine_beats import ANSWER_S, Ask, EngineBeats
from services.state.engine_sightings import EngineSightings
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.heard_engines import HeardEngines, seldom_asked
from services.state.queue import Bus
from services.state.retry import Retrier
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store
from services.trainer.fleet.engines import EnginePool
from services.workers.engines import EngineTable
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport

RESULTS = Path(__file__).parent / "results" / "engine_watch.md"
SETTLE_S = 5.0
QUIET_S = 6.0
TRAINER_S = 30.0


class Client(EngineClient):
    """Names of scripted engines are on no network: their end is told by themselves."""

    engine: ScriptedEngine

    async def until_lost(self) -> None:
        await self.engine.dead.wait()


@dataclass
class Scene:
    store: Store
    claim: Claim
    transport: ScriptedTransport
    tables: list[EngineTable]
    version: int = 0
    known: dict[str, list[float]] = field(default_factory=dict)

    @property
    def urls(self) -> list[str]:
        return [f"http://{name}" for name in self.transport.engines]

    def label(self) -> str:
        return f"{self.claim.job_id}/{self.claim.epoch}/{self.version}"

    async def until_known(self, url: str, label: str, what: str) -> None:
        """Notes for each table how long it took."""
        began, waiting = time.perf_counter(), list(self.tables)
        while waiting:
            await asyncio.sleep(0.001)
            still = [table for table in waiting if str(table._engines[url].label or "") != label]
            if len(still) < len(waiting):
                self.known.setdefault(what, []).extend([time.perf_counter() - began] * (len(waiting) - len(still)))
            waiting = still

    async def switch(self, url: str) -> None:
        self.version += 1
        self.transport.engines[url[7:]].shown_label = self.label()
        known = asyncio.create_task(self.until_known(url, self.label(), "a switch"))
        report = EngineReport(EngineState.READY, self.label())
        await self.store.fleet.mark(self.claim.job_id, self.claim.token, url, report)
        await known

    async def end(self, url: str) -> None:
        engine = self.transport.engines[url[7:]]
        engine.kill()
        await self.until_known(url, "", "an end")
        engine.dead.clear()
        await self.until_known(url, engine.shown_label, "a return")

    async def change(self, url: str) -> None:
        """Behind the trainer's back."""
        engine = self.transport.engines[url[7:]]
        held, engine.shown_label = engine.shown_label, f"{self.claim.job_id}/{self.claim.epoch}/999"
        await self.until_known(url, engine.shown_label, "a change nobody reports")
        engine.shown_label = held
        await self.until_known(url, held, "a change nobody reports")


async def scene(redis_url: str, num_workers: int, num_engines: int, *, shared: bool, num_events: int) -> list[str]:
    transport = ScriptedTransport({f"engine-{number}": ScriptedEngine("w") for number in range(num_engines)})
    async with connect(redis_url) as redis, httpx.AsyncClient(transport=transport) as http:
        await redis.flushall()
        await Bus(redis).load_functions()
        store = Store(redis)
        await store.jobs.create('{"name": "watch"}')
        claim = await store.jobs.claim("trainer")
        assert claim is not None

        def client(url: str) -> Client:
            made = Client(url, http)
            made.engine = transport.engines[url[7:]]
            return made

        at = Scene(store, claim, transport, [])
        for url in at.urls:
            transport.engines[url[7:]].shown_label = at.label()
            await store.fleet.register_engine(EngineRecord(id=url, url=url))
            await store.fleet.bind(claim.job_id, claim.token, url)
            await store.fleet.mark(claim.job_id, claim.token, url, EngineReport(EngineState.READY, at.label()))
        for number in range(num_workers):
            retrier = Retrier(Counters(), random.Random(number))
            sightings = EngineSightings(store.functions, time.monotonic) if shared else None
            at.tables.append(EngineTable(store.fleet, at.urls, client, time.monotonic, retrier, sightings=sightings))
        watching = [asyncio.create_task(table.watch()) for table in at.tables]
        await asyncio.sleep(SETTLE_S)
        rates = await rates_of(transport, num_engines)
        await events(at, num_events)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        return rows(num_workers, num_engines, shared, rates, at.known)


async def scene_with_trainer(redis_url: str, root: Path, num_workers: int, num_engines: int, *, hears: bool) -> str:
    """A real trainer's part besides: it holds all engines, and its installation names them in its settings."""
    write_model(root / "first")
    transport = ScriptedTransport(
        {f"engine-{number}": ScriptedEngine(root / "first", tick_s=0.001) for number in range(num_engines)}
    )
    urls = [f"http://{name}" for name in transport.engines]
    async with (
        connect(redis_url) as redis,
        httpx.AsyncClient(transport=transport) as http,
        contextlib.AsyncExitStack() as stack,
    ):

        def run(work: Coroutine[Any, Any, None]) -> None:
            stack.callback(asyncio.create_task(work).cancel)

        def client(url: str) -> Client:
            made = Client(url, http)
            made.engine = transport.engines[url[7:]]
            return made

        await redis.flushall()
        await Bus(redis).load_functions()
        store = Store(redis)
        await store.jobs.create('{"name": "watch"}')
        claim = await store.jobs.claim("trainer")
        assert claim is not None
        for engine in transport.engines.values():
            run(engine.run())
        weights = WeightStore(JobDir(root / claim.job_id))
        manifest = weights.write(0, claim.epoch, 0, write_model)
        heard = [HeardEngines(EngineSightings(store.functions, time.monotonic), time.monotonic) for _ in range(2)]
        pool = EnginePool(*(store, claim.job_id, claim.token, weights, urls, client), heard=heard[0] if hears else None)
        run(pool.run())
        await pool.publish(manifest)
        await pool.wait_for(manifest, num_engines=num_engines)
        asks: Mapping[str, Ask] = info_calls(map(client, urls), ANSWER_S)
        run(EngineBeats(store.fleet, seldom_asked(asks, heard[1]) if hears else asks, lease_s=30.0).run())
        for number in range(num_workers):
            retrier = Retrier(Counters(), random.Random(number))
            sightings = EngineSightings(store.functions, time.monotonic)
            table = EngineTable(store.fleet, urls, client, time.monotonic, retrier, sightings=sightings)
            run(table.watch())
        await asyncio.sleep(SETTLE_S)
        rates = await rates_of(transport, num_engines, TRAINER_S)
        infos, loads = rates["/model_info"], rates["/v1/loads"]
        way = "hears of them" if hears else "asks for itself"
        cells = f"{infos + loads:.2f} | {infos:.2f} | {loads:.2f} | {rates['cpu']:.2f}"
        return f"| {num_workers} | {num_engines} | {way} | {cells} |"


def write_model(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"architectures": ["Scripted"], "hidden_size": 8}')
    (directory / "model.safetensors").write_bytes(b"weights")


async def rates_of(transport: ScriptedTransport, num_engines: int, quiet_s: float = QUIET_S) -> dict[str, float]:
    """Requests by path, each second and engine, over a while without events."""
    transport.paths.clear()
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(quiet_s)
    took = time.perf_counter() - began
    found = Counter(transport.paths)
    cores = (time.process_time() - cpu) / took
    return {path: found[path] / took / num_engines for path in ("/model_info", "/v1/loads")} | {"cpu": cores}


async def events(at: Scene, num_events: int) -> None:
    rng = random.Random(0)
    kinds: Sequence[Callable[[str], Awaitable[None]]] = (at.switch, at.end, at.change)
    for number in range(3 * num_events):
        await kinds[number % 3](rng.choice(at.urls))
        await asyncio.sleep(rng.uniform(0.0, 1.0))


def rows(
    num_workers: int, num_engines: int, shared: bool, rates: dict[str, float], known: dict[str, list[float]]
) -> list[str]:
    way = "one for all" if shared else "each for itself"
    infos, loads = rates["/model_info"], rates["/v1/loads"]
    times = [
        f"{1000 * statistics.median(known[what]):.0f} ({1000 * sorted(known[what])[int(0.95 * len(known[what]))]:.0f})"
        for what in ("a switch", "an end", "a return", "a change nobody reports")
    ]
    cells = [str(num_workers), str(num_engines), way, f"{infos + loads:.2f}", f"{infos:.2f}", f"{loads:.2f}"]
    return ["| " + " | ".join([*cells, f"{rates['cpu']:.2f}", *times]) + " |"]


async def measure(arguments: argparse.Namespace, root: Path) -> list[str]:
    lines = []
    with RedisServer.start(root / "redis") as redis:
        for workers, engines in ((4, 2), (arguments.workers, arguments.engines)):
            for shared in (False, True):
                lines += await scene(redis.url, workers, engines, shared=shared, num_events=arguments.events)
                print(lines[-1], flush=True)
    return lines


async def measure_with_trainer(arguments: argparse.Namespace, root: Path) -> list[str]:
    lines = []
    with RedisServer.start(root / "redis") as redis:
        for workers, engines in ((4, 2), (arguments.workers, arguments.engines)):
            for hears in (False, True):
                folder = root / f"{workers}-{hears}"
                folder.mkdir()
                lines.append(await scene_with_trainer(redis.url, folder, workers, engines, hears=hears))
                print(lines[-1], flush=True)
    return lines


def add_rows_with_trainer(arguments: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
    with TemporaryDirectory() as root:
        lines = asyncio.run(measure_with_trainer(arguments, Path(root)))
    heading = (
        "\n## With a trainer\n\n"
        f"`--trainer`: a real pool of engines of a job besides, and the beats of a trainer that has them in its "
        f"settings (every 3 s), over {TRAINER_S:.0f} s, all in one process on one of {os.cpu_count()} shared logical "
        f"CPUs (load average {load:.0f} at the start). Workers watch through one process.\n\n"
        "| workers | engines | the trainer | requests | weights | load | CPU seconds a second |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    with RESULTS.open("a") as file:
        file.write(heading + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--events", type=int, default=5, help="switches, ends and changes, each")
    parser.add_argument("--trainer", action="store_true", help="only the rows with a trainer, added to the results")
    arguments = parser.parse_args()
    if arguments.trainer:
        add_rows_with_trainer(arguments)
        return
    load = os.getloadavg()[0]
    with TemporaryDirectory() as root:
        lines = asyncio.run(measure(arguments, Path(root)))
    RESULTS.write_text(
        "# Watching engines\n\n"
        f"`python -m benchmarks.engine_watch`: a real Redis, scripted engines, and a table of engines for each worker "
        f"process, all in one process on one of {os.cpu_count()} shared logical CPUs (load average {load:.0f} at the "
        f"start). Requests are each second and engine, without events; times are milliseconds until a table knows: the "
        f"median over {arguments.events} events and all tables (95 of 100 within).\n\n"
        "| workers | engines | who asks | requests | weights | load | CPU seconds a second | a switch | an end "
        "| a return | a change nobody reports |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
