"""What a wall costs beside a plain process: `python -m benchmarks.walls --rounds 200`.

Two hosts of the calculator stand side by side, one in each tier. In each round both begin a session in a process of its
own (a fork), make ten tool calls and close it; who goes first alternates, so that other work on the machine falls on
both. Printed are medians of each, and the median of the paired differences. The boot of a host is timed apart. The
processor time of a call, in the session's process, is what other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from gspo_core.env import CallStatus, ParsedTurn, ToolCall
from gspo_core.types import Split
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.hosts.venv import Interpreters
from services.hosts.walls.tiers import Tier

TURN = ParsedTurn("", (ToolCall("calculate", {"expression": "12 * 34 - 5"}, CallStatus.OK, "", 0, 1),))
NUM_CALLS = 10
Times = dict[str, list[float]]


async def opened(tier: Tier, directory: Path) -> HostedEnvironment:
    hosting = {"sessions_per_process": 1}
    order = HostOrder("environments.calculator:Calculator", hosting=hosting)
    return await HostedEnvironment.open(order, boot=LocalHosts(Interpreters(directory), WallPolicy(tier)).boot)


async def play(environment: HostedEnvironment, number: int, times: Times) -> None:
    task = await environment.task(Split.TRAIN, number)
    session = environment.session()
    begun = time.perf_counter()
    await session.start(task, number)
    times["start of a session"].append(1000 * (time.perf_counter() - begun))
    (pid,) = environment.pool.pids
    before = processor_ms(pid)
    for _ in range(NUM_CALLS):
        begun = time.perf_counter()
        await session.act(TURN)
        times["tool call"].append(1000 * (time.perf_counter() - begun))
    times["processor time of a tool call"].append((processor_ms(pid) - before) / NUM_CALLS)
    await session.close()


def processor_ms(pid: int) -> float:
    """Of all its threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6


async def measure(num_rounds: int, directory: Path) -> None:
    tiers = (Tier.PROCESS, Tier.WALL)
    times: dict[Tier, Times] = {tier: defaultdict(list) for tier in tiers}
    for number in range(5):
        for tier in tiers[:: -1 if number % 2 else 1]:
            begun = time.perf_counter()
            environment = await opened(tier, directory)
            times[tier]["boot of a host"].append(1000 * (time.perf_counter() - begun))
            await environment.close()
    hosts = {tier: await opened(tier, directory) for tier in tiers}
    for number in range(num_rounds):
        for tier in tiers[:: -1 if number % 2 else 1]:
            await play(hosts[tier], number, times[tier])
    for host in hosts.values():
        await host.close()
    print("| what | process, p50 ms | wall, p50 ms | difference of medians, ms | median of paired differences, ms |")
    print("|---|---|---|---|---|")
    for what, plain in times[Tier.PROCESS].items():
        walled = times[Tier.WALL][what]
        middle, other = statistics.median(plain), statistics.median(walled)
        paired = statistics.median(one - two for one, two in zip(walled, plain, strict=True))
        print(f"| {what} | {middle:.2f} | {other:.2f} | {other - middle:.2f} | {paired:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds: int = parser.parse_args().rounds
    print(f"{rounds} rounds of {NUM_CALLS} calls, load {os.getloadavg()[0]:.1f} before")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(rounds, Path(directory)))
    print(f"load {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
