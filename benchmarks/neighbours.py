"""What bad company costs a healthy job: `python -m benchmarks.neighbours` (`neighbour` or `network` for one half).

A real worker, queue and host; a simulated engine that takes about 6 s for a turn, so that what is measured is its time
and not that of a busy machine. Throughput is the turns of the healthy job, whose episodes never end meanwhile.
`neighbour`: a second job in the same worker, all of whose episodes end the process of their world at their first
action, beside one that is as healthy as the first. `network`: 30 ms round trips to Redis and to the engine, and one
exchange in a hundred cut, beside lines without delay. With and without one after the other, each with processes of its
own and the machine to itself, so that what the neighbour computes is counted too; `--together` runs both at the same
time, where other work on the machine would be taken for a difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.rollout_stage import LoopLag, Stage, machine, open_stage
from services.state.store import Claim

RESULTS = Path(__file__).with_name("results") / "neighbours.md"
NUM_GROUPS, GROUP_SIZE, PLACES = 4, 8, 64
NUM_EXPLODING_GROUPS = 200
TURN_S = (5.0, 7.0)
ONE_WAY_S, CUT_SHARE = 0.015, 0.01

PAGE = """# Bad company

Written by `python -m benchmarks.neighbours --seconds {seconds:g} --pairs {pairs}`: turns of the healthy job per second,
{episodes} episodes of it, {places} places in the worker, {low:g} to {high:g} s a turn. {machine}.
Both sides of a pair ran {manner}. "CPU" is the share of a core that the worker took, "lag" how late its event
loop was (p99), each without and with.

| what | without | with | change | CPU | lag, ms |
|---|---|---|---|---|---|
{rows}

{verdicts}
"""


class SlowLine:
    """A proxy: every piece of data is so late, and one exchange in so many ends the connection without an answer."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._rng = random.Random(0)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_cut = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[SlowLine]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**22)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._upstream.startswith("unix://"):
            return await asyncio.open_unix_connection(self._upstream.removeprefix("unix://"), limit=2**22)
        host, _, port = self._upstream.partition("://")[2].partition(":")
        return await asyncio.open_connection(host, int(port), limit=2**22)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        far_reader, far_writer = await self._connect()
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, CUT_SHARE)),
            asyncio.create_task(self._pump(far_reader, writer, 0.0)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            return
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, far_writer):
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut_share: float) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(2**20):
            if self._rng.random() < cut_share:
                self.num_cut += 1
                return
            # Data that follows is not held up by what is on its way.
            loop.call_later(ONE_WAY_S, _write, writer, data)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


async def _submit(stage: Stage, world: str) -> Claim:
    limits = {"max_turns": 1000, "max_tool_calls": 1000, "max_episode_tokens": 100_000}
    claim = await stage.submit(world, {"page_chars": 200}, limits=limits)
    await stage.serve(claim, seconds=TURN_S)
    num_groups = NUM_EXPLODING_GROUPS if world == "Bomb" else NUM_GROUPS
    await stage.dispatch(claim, range(num_groups), size=GROUP_SIZE)
    return claim


@dataclass(frozen=True)
class Found:
    turns_per_s: float
    cpu: float
    lag_ms: float


async def _measure(stage: Stage, claim: Claim, seconds: float) -> Found:
    """Of one job, after a while in which everything begins."""
    await asyncio.sleep(seconds / 4)
    position, num_turns = "0", 0
    while entries := await stage.bus.read_segments(claim.job_id, position, count=5000, block_ms=0):
        position = entries[-1][0]
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    begun, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    watching.cancel()
    cpu = (time.process_time() - cpu) / (time.monotonic() - begun)
    while entries := await stage.bus.read_segments(claim.job_id, position, count=5000, block_ms=0):
        position, num_turns = entries[-1][0], num_turns + len(entries)
    return Found(num_turns / (time.monotonic() - begun), cpu, lag.percentile(0.99))


async def beside(neighbour: str, seconds: float) -> Found:
    async with open_stage(num_turn_tokens=100) as stage:
        healthy = await _submit(stage, "Library")
        await _submit(stage, neighbour)
        async with stage.working(max_episodes=PLACES):
            return await _measure(stage, healthy, seconds)


async def over(is_slow: bool, seconds: float) -> Found:
    async with open_stage(num_turn_tokens=100) as stage, contextlib.AsyncExitStack() as lines:
        healthy = await _submit(stage, "Library")
        if is_slow:
            redis_line = await lines.enter_async_context(SlowLine(stage.redis_url).open())
            engine_line = await lines.enter_async_context(SlowLine(stage.engine_urls[healthy.job_id]).open())
            stage.redis_url = f"redis://127.0.0.1:{redis_line.port}"
            stage.engine_urls[healthy.job_id] = f"http://127.0.0.1:{engine_line.port}"
        async with stage.working(max_episodes=PLACES):
            return await _measure(stage, healthy, seconds)


Measure = Callable[[float], Coroutine[Any, Any, Found]]
HALVES: dict[str, tuple[str, float, Measure, Measure]] = {
    "neighbour": (
        "an exploding job beside it",
        0.05,
        lambda seconds: beside("Library", seconds),
        lambda seconds: beside("Bomb", seconds),
    ),
    "network": (
        "30 ms round trips, 1 % of exchanges cut",
        0.20,
        lambda seconds: over(False, seconds),
        lambda seconds: over(True, seconds),
    ),
}


async def _apart(name: str, with_it: bool, seconds: float) -> Found:
    """In processes of its own."""
    command = [sys.executable, "-m", "benchmarks.neighbours", name, "--seconds", str(seconds)]
    child = await asyncio.create_subprocess_exec(
        *command, "--only", "with" if with_it else "without", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    return msgspec.json.decode(output.splitlines()[-1], type=Found)


async def measure_one(name: str, which: str, seconds: float) -> None:
    _, _, without, with_it = HALVES[name]
    found = await (with_it if which == "with" else without)(seconds)
    print(msgspec.json.encode(found).decode())


async def _pair(name: str, place: int, seconds: float, is_together: bool) -> tuple[Found, Found]:
    """Without and with; in turns the first one is another."""
    if is_together:
        without, with_it = await asyncio.gather(*(_apart(name, which, seconds) for which in (False, True)))
        return without, with_it
    found = {which: await _apart(name, which, seconds) for which in ((False, True) if place % 2 else (True, False))}
    return found[False], found[True]


async def main(names: list[str], seconds: float, num_pairs: int, is_together: bool) -> None:
    rows, verdicts = [], []
    for name in names:
        what, aim, *_ = HALVES[name]
        changes = []
        for place in range(num_pairs):
            one, two = await _pair(name, place, seconds, is_together)
            changes.append(two.turns_per_s / one.turns_per_s - 1)
            rates = f"{one.turns_per_s:.2f} | {two.turns_per_s:.2f} | {changes[-1]:+.1%}"
            rows.append(f"| {what} | {rates} | {one.cpu:.0%}, {two.cpu:.0%} | {one.lag_ms:.0f}, {two.lag_ms:.0f} |")
            print(rows[-1], flush=True)
        verdict = "kept" if -median(changes) < aim else "missed"
        verdicts.append(
            f"- {what}: {median(changes):+.1%}, the median of {num_pairs} pairs from {min(changes):+.1%} to "
            f"{max(changes):+.1%} (aim: a loss of less than {aim:.0%}: {verdict})."
        )
    page = PAGE.format(
        seconds=seconds,
        pairs=num_pairs,
        manner="at the same time" if is_together else "one after the other",
        places=PLACES,
        episodes=NUM_GROUPS * GROUP_SIZE,
        low=TURN_S[0],
        high=TURN_S[1],
        machine=machine(),
        rows="\n".join(rows),
        verdicts="\n".join(verdicts),
    )
    RESULTS.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("halves", nargs="*", default=list(HALVES), help="neighbour, network (default: both)")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--only", choices=("with", "without"), help="measure one side of one half and print it")
    parser.add_argument("--together", action="store_true", help="both sides of a pair at the same time")
    arguments = parser.parse_args()
    if arguments.only:
        asyncio.run(measure_one(arguments.halves[0], arguments.only, arguments.seconds))
    else:
        asyncio.run(main(arguments.halves, arguments.seconds, arguments.pairs, arguments.together))
