"""How many turns a second go through the environment host, and how long one takes: `python -m benchmarks.host`.

A turn is one tool call: JSON to the host's process, the tool, JSON back. The environment is the calculator (sync, in a
thread of its session) or the same with async members (on the event loop). CPU time is that of this process and of the
host's processes together, so turns/s per core do not depend on what else runs here. With `turns/s asked` "all" every
session acts again at once, so a turn waits for those of the others; else turns come at that rate, as a policy asks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path

from environments.calculator import Calculator
from gspo_core.env import CallStatus, ParsedTurn, ToolCall, load_environment
from gspo_core.types import Split
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment, HostedSession

TURN = ParsedTurn("", (ToolCall("calculate", {"expression": "12 * 34 - 5"}, CallStatus.OK, "", 0, 1),))
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


class AsyncCalculator(Calculator):
    """Use the calculator. Then answer with the number only."""

    async def reset(self, expression: str) -> str:  # type: ignore[override]
        return super().reset(expression)

    async def calculate(self, expression: str) -> str:  # type: ignore[override]
        """Compute an expression.

        Args:
            expression: numbers joined by + - *
        """
        return super().calculate(expression)

    async def on_message(self, text: str) -> None:  # type: ignore[override]
        super().on_message(text)

    async def get_reward(self) -> float:  # type: ignore[override]
        return super().get_reward()


def cpu_s(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) * _TICKS_S


async def measure(name: str, num_sessions: int, num_turns: int, asked_per_s: int | None) -> str:
    environment = await HostedEnvironment.open(HostOrder(f"benchmarks.host:{name}"))
    sessions = [environment.session() for _ in range(num_sessions)]
    begun = time.perf_counter()
    for number, session in enumerate(sessions):
        await session.start(await environment.task(Split.TRAIN, number), number)
    start_ms = (time.perf_counter() - begun) / num_sessions * 1e3
    took: list[float] = []

    async def play(session: HostedSession) -> None:
        generator = random.Random(id(session))
        for _ in range(num_turns):
            if asked_per_s is not None:
                await asyncio.sleep(generator.expovariate(asked_per_s / num_sessions))
            asked = time.perf_counter()
            await session.act(TURN)
            took.append((time.perf_counter() - asked) * 1e3)

    pids = [os.getpid(), *environment.pool.pids]
    begun, cpu = time.perf_counter(), cpu_s(pids)
    await asyncio.gather(*(play(session) for session in sessions))
    wall, cpu = time.perf_counter() - begun, cpu_s(pids) - cpu
    for session in sessions:
        await session.close()
    num_processes = environment.pool.num_processes
    await environment.close()
    p50, p95 = statistics.quantiles(took, n=20)[9], statistics.quantiles(took, n=20)[18]
    cells = (
        *(name, num_sessions, num_processes, asked_per_s or "all", f"{len(took) / wall:,.0f}"),
        *(f"{len(took) / cpu:,.0f}", f"{p50:.2f}", f"{p95:.2f}", f"{start_ms:.1f}"),
    )
    return f"| {' | '.join(map(str, cells))} |"


async def measure_here(name: str, num_turns: int) -> str:
    """The same without a host, for comparison: one session in this process."""
    environment = load_environment(f"benchmarks.host:{name}")
    session = environment.session()
    await session.start(await environment.task(Split.TRAIN, 0), 0)
    took = []
    for _ in range(num_turns):
        asked = time.perf_counter()
        await session.act(TURN)
        took.append((time.perf_counter() - asked) * 1e3)
    await session.close()
    cuts = statistics.quantiles(took, n=20)
    return (
        f"| {name}, no host | 1 | 0 | all | {1e3 * len(took) / sum(took):,.0f} | | {cuts[9]:.2f} | {cuts[18]:.2f} | |"
    )


async def main(num_turns: int) -> None:
    heads = ("class", "sessions", "processes", "turns/s asked", "turns/s", "turns/s per core", "p50 ms", "p95 ms")
    print(f"| {' | '.join((*heads, 'start ms'))} |")
    print("|---" * (len(heads) + 1) + "|")
    for name in ("AsyncCalculator", "Calculator"):
        print(await measure_here(name, num_turns))
        for num_sessions, asked_per_s in ((1, None), (64, 300), (8, None), (64, None), (256, None)):
            row = await measure(name, num_sessions, max(20, num_turns // num_sessions), asked_per_s)
            print(row, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8000, help="turns of each row (default: %(default)s)")
    asyncio.run(main(parser.parse_args().turns))
