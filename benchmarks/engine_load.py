"""How many requests should an engine be given at a time? Fixed limits beside the one that follows its load.

Run: ``python -m benchmarks.engine_load [--seconds 20]``. Two scripted engines in this process, of which nobody knows
that one runs 48 requests at once and the other 12, and that neither has memory for the keys and values of that many
long ones: what grows beyond it is retracted and read again, which takes the engine's time. Episodes of four turns want
to be sampled, and the router is the rollout worker's own (`services.workers.engines`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import httpx

from gspo_core.versions import WeightFile, WeightsManifest
from services.engines.sglang import EngineClient
from services.episodes.metering import Counters
from services.state.fleet_records import EngineRecord, EngineReport, EngineState
from services.state.retry import Retrier
from services.workers.engine_watch import InFlightLimit
from services.workers.engines import EngineTable, JobEngines
from tests.apparatus.scripted_engine import ScriptedEngine, ScriptedTransport

RESULTS = Path(__file__).parent / "results" / "engine_load.md"
JOB = "job_a"
VOCAB_SIZE = 16
# Less than both engines run at once when each is given what it can take, and far more.
DEMANDS = (56, 160)
NUM_TURNS, READ_TOKENS = 4, 10
WORLD_S = 0.1
SIZES = {"large": 48, "small": 12}


class Fixed(InFlightLimit):
    """Whatever the engine says."""

    def report(self, *, num_ours: int, num_running: int, num_waiting: int) -> None:
        return


class OneVersion:
    """What the router reads of the store."""

    def __init__(self) -> None:
        self.manifest = WeightsManifest(JOB, 0, 1, 0, (WeightFile("w", 1, "0" * 64),))

    async def engines(self) -> list[EngineRecord]:
        ready = EngineReport(EngineState.READY)
        urls = [f"http://{name}" for name in SIZES]
        return [EngineRecord(id=url, url=url, job=JOB, report=ready) for url in urls]

    async def current(self, job: str) -> WeightsManifest:
        return self.manifest

    async def manifests(self, job: str, numbers: Collection[int]) -> list[WeightsManifest]:
        return [self.manifest] if self.manifest.version in numbers else []


@dataclass
class Result:
    tokens_per_s: float
    again_per_token: float
    """Tokens that an engine read, for each that it sampled."""
    shares: dict[str, float]
    turn_p50_s: float
    turn_p95_s: float
    limits: dict[str, int]


def engine(name: str) -> ScriptedEngine:
    size = SIZES[name]
    made = ScriptedEngine(
        "w0",
        vocab_size=VOCAB_SIZE,
        context_length=4096,
        tick_s=0.02,
        prefill_s=0.00005,
        max_running=size,
        max_tokens=size * 140,
    )
    made.label = made.shown_label = f"{JOB}/1/0"
    return made


async def measure(make_limit: Callable[[], InFlightLimit], num_episodes: int, seconds: float) -> Result:
    engines = {name: engine(name) for name in SIZES}
    ticking = [asyncio.create_task(one.run()) for one in engines.values()]
    counters, leaving, took = Counters(), asyncio.Event(), list[float]()
    retrier = Retrier(counters, random.Random(0))
    async with httpx.AsyncClient(transport=ScriptedTransport(engines)) as http:
        store = OneVersion()
        table = EngineTable(
            store, (), lambda url: EngineClient(url, http), time.monotonic, retrier, make_limit=make_limit
        )
        router = JobEngines(
            table,
            store,
            JOB,
            max_staleness=1,
            vocab_size=VOCAB_SIZE,
            retrier=retrier,
            counters=counters,
            clock=time.monotonic,
            leaving=leaving,
        )
        ticking += [asyncio.create_task(table.watch()), asyncio.create_task(router.watch())]
        playing = [asyncio.create_task(play(router, random.Random(seed), took)) for seed in range(num_episodes)]
        await asyncio.sleep(seconds)
        for task in [*playing, *ticking]:
            task.cancel()
        await asyncio.gather(*playing, *ticking, return_exceptions=True)
    num = sum(one.num_generated for one in engines.values())
    return Result(
        tokens_per_s=num / seconds,
        again_per_token=sum(one.num_prefilled for one in engines.values()) / num,
        shares={name: one.num_generated / num for name, one in engines.items()},
        turn_p50_s=statistics.median(took),
        turn_p95_s=statistics.quantiles(took, n=20)[18],
        limits={one.url.removeprefix("http://"): one.limit.value for one in table.serving(JOB)},
    )


async def play(router: JobEngines, rng: random.Random, took: list[float]) -> None:
    """One episode after the other: turns of ragged length, and a world that answers."""
    while True:
        ids, known = [rng.randrange(16) for _ in range(30)], ""
        for _ in range(NUM_TURNS):
            began = time.monotonic()
            sampled = await router.sample(
                ids,
                max_new_tokens=min(120, 5 + int(rng.expovariate(1 / 30))),
                temperature=1.0,
                stop_token_ids=[],
                prefer_engine=known,
            )
            took.append(time.monotonic() - began)
            ids, known = (
                [*ids, *sampled.ids, *(rng.randrange(16) for _ in range(READ_TOKENS))],
                sampled.engine_id,
            )
            await asyncio.sleep(WORLD_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    arguments = parser.parse_args()
    rows: dict[str, Callable[[], InFlightLimit]] = {
        f"fixed, {number} each": (lambda number=number: Fixed(number))  # type: ignore[misc]
        for number in (12, 28, 48, 1000)
    }
    rows["follows the load"] = InFlightLimit
    lines = [
        "# What is in flight at an engine\n",
        "Two scripted engines, of which one runs 48 requests at once and the other 12; nobody says so. "
        f"{arguments.seconds:g} s a row, the search for the limit included; {os.cpu_count()} logical CPUs, load "
        f"average {os.getloadavg()[0]:.1f} at the start.\n",
        "| episodes | limit | sampled tokens/s | read for each | large : small | turn, p50 s | p95 s | limits, end |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for num_episodes, (name, make_limit) in itertools.product(DEMANDS, rows.items()):
        one = asyncio.run(measure(make_limit, num_episodes, arguments.seconds))
        cells = (
            *(str(num_episodes), name, f"{one.tokens_per_s:,.0f}", f"{one.again_per_token:.2f}"),
            " : ".join(f"{one.shares[size]:.0%}" for size in SIZES),
            *(f"{one.turn_p50_s:.2f}", f"{one.turn_p95_s:.2f}"),
            ", ".join(str(one.limits.get(size, "")) for size in SIZES),
        )
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
