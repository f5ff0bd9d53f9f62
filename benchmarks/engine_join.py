"""How long does it take until an engine that is announced answers for a job? Real Redis, engines, pool and router.

Run: ``python -m benchmarks.engine_join [--rounds 5] [--venv .venv-sglang --model DIR]``. A job has one engine, which 32
callers keep busy. A second one, started but in nobody's settings, is announced; it is found and tested, bound, given
the job's weights, seen by the rollout worker, and asked. With an environment of SGLang the second is a real server;
``DIR`` is then a model with a tokenizer, such as the demo's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import Engine as EmbeddedProcess
from benchmarks.engine import make_model
from services.engines.http_engine import open_http
from services.engines.protocol import info_calls
from services.engines.sglang import EngineClient
from services.episodes.metering import Counters
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.engine_beats import ANSWER_S, EngineBeats
from services.state.queue import Bus
from services.state.retry import Retrier
from services.state.server import RedisServer, connect
from services.state.store import Store
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import FromDisk, ThroughGroup, WeightTransport
from services.workers.engines import EngineTable, JobEngines
from tests.apparatus.sglang_process import SGLangProcess

RESULTS = Path(__file__).parent / "results" / "engine_join.md"
NUM_CALLERS, NUM_TOKENS = 32, 8
TRANSPORTS: dict[str, type[FromDisk] | type[ThroughGroup]] = {"disk": FromDisk, "group": ThroughGroup}


@dataclass
class Join:
    """Seconds since the announcement."""

    bound: float
    ready: float
    answered: float


async def join(redis_url: str, root: Path, model_dir: Path, first: str, late: str, transport: WeightTransport) -> Join:
    async with connect(redis_url) as redis, open_http() as http, contextlib.AsyncExitStack() as stack:
        await redis.flushall()
        await Bus(redis).load_functions()
        store = Store(redis)

        def client(url: str) -> EngineClient:
            return EngineClient(url, http)

        def run(work: asyncio.Task[None]) -> None:
            stack.callback(work.cancel)

        await reset(client(late), model_dir)
        job = (await store.jobs.create('{"name": "join"}')).id
        claim = await store.jobs.claim("trainer")
        assert claim is not None
        weights = WeightStore(JobDir(root / job))
        manifest = weights.write(0, claim.epoch, 0, lambda path: copy(model_dir, path))
        await store.versions.publish(job, claim.token, manifest)
        engines = EnginePool(store, job, claim.token, weights, [first], client, transport=transport)
        run(asyncio.create_task(engines.run()))
        await engines.publish(manifest)
        await engines.wait_for(manifest)
        retrier = Retrier(counters := Counters(), random.Random(0))
        table = EngineTable(store.fleet, [first], client, time.monotonic, retrier)
        router = JobEngines(
            table,
            store.versions,
            job,
            max_staleness=1,
            vocab_size=json.loads((model_dir / "config.json").read_text())["vocab_size"],
            retrier=retrier,
            counters=counters,
            clock=time.monotonic,
            leaving=asyncio.Event(),
        )
        run(asyncio.create_task(table.watch()))
        run(asyncio.create_task(router.watch()))
        answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        for number in range(NUM_CALLERS):
            run(asyncio.create_task(call(router, number, late, answered)))
        await asyncio.sleep(1.0)
        began = time.perf_counter()
        run(asyncio.create_task(EngineBeats(store.fleet, info_calls([client(late)], ANSWER_S), lease_s=30.0).run()))
        seen: dict[str, float] = {}
        while not answered.done():
            for name, urls in (("bound", engines.bound()), ("ready", [one.url for one in engines.ready()])):
                if late in urls:
                    seen.setdefault(name, time.perf_counter() - began)
            await asyncio.sleep(0.002)
        await engines.release()
        return Join(**seen, answered=answered.result() - began)


async def reset(engine: EngineClient, model_dir: Path) -> None:
    """As a server is that was just started."""
    await engine.pause("abort")
    await engine.load_weights(model_dir, "default")
    await engine.resume()


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


async def call(router: JobEngines, number: int, late: str, answered: asyncio.Future[float]) -> None:
    """One request after the other, as episodes do."""
    rng = random.Random(number)
    while True:
        ids = [rng.randrange(500) for _ in range(40)]
        sampled = await router.sample(ids, max_new_tokens=NUM_TOKENS, temperature=1.0, stop_token_ids=[])
        if sampled.engine_id == late and not answered.done():
            answered.set_result(time.perf_counter())


async def measure(arguments: argparse.Namespace, root: Path) -> list[str]:
    model_dir = arguments.model or root / "model"
    if arguments.model is None:
        make_model(model_dir)
    lines = []
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer.start(root / "redis"))
        async with open_http() as http:
            embedded = [EmbeddedProcess(model_dir, http) for _ in range(2)]
            for one in embedded:
                stack.callback(one.process.wait)
                stack.callback(one.process.terminate)
            for one in embedded:
                while not await one.client.is_ready():
                    await asyncio.sleep(0.2)
            late = {"embedded": embedded[1].client.url}
            if arguments.venv is not None:
                server = await asyncio.to_thread(SGLangProcess, arguments.venv, model_dir, root / "sglang.log")
                stack.callback(server.close)
                late["SGLang 0.5.23, CPU"] = server.url
            for name, url in late.items():
                for how, transport in TRANSPORTS.items():
                    joins = [
                        await join(redis.url, root, model_dir, embedded[0].client.url, url, transport())
                        for _ in range(arguments.rounds)
                    ]
                    lines.append(row(name, how, joins))
                    print(lines[-1], flush=True)
    return lines


def row(name: str, how: str, joins: list[Join]) -> str:
    parts = [[one.bound for one in joins], [one.ready for one in joins], [one.answered for one in joins]]
    cells = [f"{statistics.median(part):.2f}" for part in parts]
    return f"| {name} | {how} | {' | '.join(cells)} | {max(parts[2]):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--venv", type=Path, help="environment of SGLang")
    parser.add_argument("--model", type=Path, help="a model with a tokenizer, for SGLang")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(arguments, Path(folder)))
    head = [
        "# From the announcement of an engine to its first answer\n",
        f"Seconds since the announcement, the median of {arguments.rounds} (and the slowest answer); an answer has "
        f"{NUM_TOKENS} tokens. Trainers look for engines every 2 s. {os.cpu_count()} logical CPUs, load average "
        f"{load:.1f} at the start.\n",
        "| engine | weights by | tested and bound | holds the weights | has answered | slowest |",
        "|---|---|---|---|---|---|",
    ]
    RESULTS.write_text("\n".join([*head, *rows]) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
