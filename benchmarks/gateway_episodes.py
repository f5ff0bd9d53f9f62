"""What short episodes cost: `python -m benchmarks.gateway_episodes`, and with `--against TREE` beside another tree.

A real gateway process, its hosts, real Redis and an engine that only waits. Each agent is behind a URL, plays two turns
of few tokens and answers its start with its end, as `examples/agent/service.py` does; the agents live in this process.
With a tree to compare with (a checkout with a `.venv` of its own), the two are run in turn, so that what the machine's
other work costs falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from benchmarks.gateway_stage import Agent, Episode, Gateway, Process, open_gateway
from benchmarks.rollout_stage import machine
from examples.demo.memory import process_tree

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results") / "gateway_episodes.md"
NUM_TURNS = 2
TURN_TOKENS = 24
READ_TOKENS = 16
ENGINE_S = 0.05
# Before anything is measured: connections are opened and code is loaded.
WARM_EPISODES = 64
PARTS = ("gateway", "hosts", "redis")

PAGE = """# What short episodes cost

Written by `python -m benchmarks.gateway_episodes --episodes {episodes} --at-once {at_once} --rounds {rounds}`: one
process `python -m services.gateway` and its hosts, Redis with `appendfsync always`, and an engine that takes
{engine_ms:.0f} ms and computes nothing. An episode is one start of an agent behind a URL, {turns} turns (OpenAI Chat
Completions, one tool; each samples {turn_tokens} tokens and reads {read_tokens}), its end and its reward; {at_once} are
played at once. {machine}. Medians of {rounds} rounds, each with processes of its own.{against}

{table}

What a place costs: on 30 November 2026, nothing else running, two checkouts of one commit (2127808e) differed by 5 % in
a turn's time and by 1 % in the gateway's CPU (six rounds, single ones 0.95 to 1.06). Measured beside 9ac559b4, one of
them computed 1.00 times as much (eight rounds, 0.97 to 1.06), the other 1.05 times (six rounds, 1.00 to 1.22). So less
than a tenth is not told. bfa00386 had computed 0.76 times as much as 0aee9692 (five rounds, 0.70 to 0.79; both older).

Where the tree keeps the connections over which it starts episodes, so does the service. An older tree was measured
in turn with a4380c4, at a load of 21.8: gateway, hosts and Redis computed 4.40, 1.48 and 0.68 ms an episode, after
6.22, 1.90 and 1.04 (all three 0.68 times as much, 0.65 to 0.73).
"""
AGAINST = """ "Before" is commit
{commit}, run in turn with this tree ({own}); a ratio is the median of those of the rounds, with the least and the
greatest."""


@dataclass(frozen=True)
class Costs:
    """CPU ms of an episode, by part, and the seconds that its turns took."""

    gateway: float
    hosts: float
    redis: float
    turn_ms: float
    rate: float


class Reception:
    """Where the gateway starts agents: each start is answered when its episode is over."""

    def __init__(self) -> None:
        self.gateway: asyncio.Future[Gateway] = asyncio.get_running_loop().create_future()
        self.turns_s: list[float] = []
        self.num_ended = 0
        self.ended = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._receive, "127.0.0.1", 0, backlog=2048)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/play"
        finally:
            server.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps the connection as long as whoever starts agents does."""
        # Cancelled: the measurement is over.
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                await self._play(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        writer.close()

    async def _play(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        agent = msgspec.json.decode(await reader.readexactly(length), type=Agent)
        episode = Episode((await self.gateway).http, agent.base_url, agent.api_key, agent.reward_key or agent.api_key)
        for _ in range(NUM_TURNS):
            episode.read(READ_TOKENS)
            self.turns_s.append(await episode.turn())
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n{"reward": 1}')
        await writer.drain()
        async with self.ended:
            self.num_ended += 1
            self.ended.notify_all()

    async def until(self, number: int) -> None:
        async with self.ended:
            await self.ended.wait_for(lambda: self.num_ended >= number)


def cpu_of(gateway: Gateway) -> dict[str, float]:
    _, *hosts = process_tree(gateway.process.pid)
    redis = [pid for pid in process_tree(os.getpid()) if is_redis(pid)]
    return {
        "gateway": gateway.process.cpu_s(),
        "hosts": sum(Process(pid).cpu_s() for pid in hosts),
        "redis": sum(Process(pid).cpu_s() for pid in redis),
    }


def is_redis(pid: int) -> bool:
    return (Path("/proc") / str(pid) / "comm").read_text().startswith(("redis", "valkey"))


async def measure(num_episodes: int, at_once: int) -> Costs:
    reception = Reception()
    async with (
        reception.open() as url,
        open_gateway(
            turn_tokens=TURN_TOKENS, seconds=(ENGINE_S, ENGINE_S), max_episodes=at_once, agent_url=url
        ) as gateway,
    ):
        reception.gateway.set_result(gateway)
        await gateway.dispatch(WARM_EPISODES)
        await reception.until(WARM_EPISODES)
        reception.turns_s.clear()
        before, began = cpu_of(gateway), time.perf_counter()
        await gateway.dispatch(num_episodes)
        await reception.until(WARM_EPISODES + num_episodes)
        after, took_s = cpu_of(gateway), time.perf_counter() - began
    spent = {part: (after[part] - before[part]) / num_episodes * 1e3 for part in PARTS}
    return Costs(**spent, turn_ms=statistics.median(reception.turns_s) * 1e3, rate=num_episodes / took_s)


def measured_in(tree: Path, arguments: argparse.Namespace) -> Costs:
    """By this module of that tree, in a process of its own."""
    command = [str(tree / ".venv" / "bin" / "python"), "-m", "benchmarks.gateway_episodes", "--json"]
    given = ["--episodes", str(arguments.episodes), "--at-once", str(arguments.at_once)]
    done = subprocess.run([*command, *given], cwd=tree, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Costs)


def commit_of(tree: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def table(ours: list[Costs], theirs: list[Costs]) -> str:
    rows: dict[str, Callable[[Costs], float]] = {
        "CPU ms an episode, gateway": lambda one: one.gateway,
        "its hosts": lambda one: one.hosts,
        "Redis": lambda one: one.redis,
        "all three": lambda one: one.gateway + one.hosts + one.redis,
        "a turn, ms (p50)": lambda one: one.turn_ms,
        "episodes a second": lambda one: one.rate,
    }
    lines = ["| | this tree | before | ratio |", "|---|---:|---:|---:|"] if theirs else ["| | |", "|---|---:|"]
    for name, value in rows.items():
        mine = statistics.median(map(value, ours))
        cells = [f"{mine:.2f}"]
        if theirs:
            ratios = [value(one) / value(other) for one, other in zip(ours, theirs, strict=True)]
            cells += [
                f"{statistics.median(map(value, theirs)):.2f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, metavar="TREE")
    parser.add_argument("--json", action="store_true", help="one round, printed only")
    parser.add_argument("--look", action="store_true", help="print only; nothing is stored")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(asdict(asyncio.run(measure(arguments.episodes, arguments.at_once)))))
        return
    ours, theirs = list[Costs](), list[Costs]()
    trees = [(ROOT, ours)] if arguments.against is None else [(ROOT, ours), (arguments.against, theirs)]
    for _ in range(arguments.rounds):
        for tree, costs in trees:
            costs.append(measured_in(tree, arguments))
        trees.reverse()  # where one always comes first, it was up to a tenth dearer for that alone
        print(table(ours, theirs), file=sys.stderr, flush=True)
    text = PAGE.format(
        episodes=arguments.episodes,
        at_once=arguments.at_once,
        rounds=arguments.rounds,
        engine_ms=ENGINE_S * 1e3,
        turns=NUM_TURNS,
        turn_tokens=TURN_TOKENS,
        read_tokens=READ_TOKENS,
        machine=machine(),
        against=""
        if arguments.against is None
        else AGAINST.format(commit=commit_of(arguments.against), own=commit_of(ROOT)),
        table=table(ours, theirs),
    )
    print(text)
    if not arguments.look:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
