"""What the gateway itself costs: `python -m benchmarks.gateway`.

A real gateway process before real Redis and an engine that only waits; the agents live in this process, keep their
whole history and send it with each request, as clients do. Each turn through the gateway is followed by a plain call to
the same engine with as many ids, so what the machine's other work costs falls on both. CPU time is that of the
gateway's process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from redis.asyncio import Redis

from benchmarks.gateway_stage import Episode, Gateway, many_tools, open_gateway
from benchmarks.rollout_stage import machine
from gspo_core.types import EpisodeKey

RESULTS = Path(__file__).with_name("results") / "gateway.md"
TURN_TOKENS = 128
# Turns of a conversation, and the tokens that each brings beside those that are sampled.
LENGTHS = ((30, 890), (60, 890), (120, 126))
NUM_WINDOWS = 6
STREAM_S = 120.0
OPENED_A_SECOND = 50
LONG_TURNS, LONG_TOKENS, LOOKED_AT = 500, 48, 100
NUM_TOOLS = 60
MAX_TRIES = 10

PAGE = """# What the gateway costs

Written by `python -m benchmarks.gateway --episodes {episodes} --rounds {rounds} --streams {streams}`: one process
`python -m services.gateway`, Redis with `appendfsync always`, and an engine that waits and computes nothing; agents in
another process, which send their whole history with each request (OpenAI Chat Completions, one tool). A turn reads a
tool's result and samples {turn_tokens} tokens, a call among them; a token is a word of 2 to 5 letters. {machine}.
CPU time is that of the gateway's process. "Added" is the time of a turn less that of a plain call to the same engine
with as many ids, made right after it by the same client, pair by pair.

## One turn at a time

{episodes} episodes in turn, the engine takes 50 ms. {rounds} rounds, each with a process of its own: CPU time and
memory are the median of the rounds, the others are of all turns together.

| turns | history, tokens | body, KiB | CPU ms a turn | added p50 ms | added p99 ms | plain p50 ms | MiB an episode |
|---|---|---|---|---|---|---|---|
{turns}

Memory is what the process grew by since its episodes were opened, divided by their number. A line through all rows: a
turn costs {fixed:.2f} ms and {slope:.3f} ms for each 1,000 tokens of its history. The rows of {long_turns} turns read
{long_read} tokens a turn: as many tokens as the first rows, in four times as many messages.

## {crowd} agents at once

The engine takes 500 ms; {crowd_turns} turns each, up to {crowd_tokens:,} tokens: {crowd_cpu:.2f} CPU ms a turn,
{crowd_rate:.0f} turns a second; added p50 {crowd_p50:.0f} ms, p99 {crowd_p99:.0f} ms; a plain call took
{crowd_plain:.0f} ms (p50), so a turn took {crowd_ratio:.2f} times as long.

## {streams:,} open streams

Opened {opened_a_second} a second; the engine takes {stream_s:.0f} s for each, and a comment keeps a stream alive every
10 s. {answered:,} of {streams:,} streams were answered whole, {tried_again:,} of them at a later try. Memory:
{episode_kib:.0f} KiB for each episode that is open and has asked nothing, {stream_kib:.0f} KiB more for each with an
open stream. While they waited the process used {idle:.1%} of a core ({alive:,} comments in {watched:.0f} s), and
another request (`GET /v1/models`) took p50 {ping_p50:.1f} ms, p99 {ping_p99:.1f} ms, against {quiet_p50:.1f} and
{quiet_p99:.1f} ms before the streams were opened. The hosts of {streams:,} agents behind a URL are processes of their
own and not counted here.

## One long episode with {num_tools} tools

An episode whose agent sends {num_tools} tools of about 1 kB with each request; {long_tokens} tokens are sampled a turn,
and the engine takes 5 ms. "Grown" is the process' memory beyond what it was behind the first turn; "written" is what
Redis was sent a turn (segments, what is kept of the turn, whatever else the stack says meanwhile), and "kept" by how
much grew what stands there of the episode's turns beside its segments.

| turns | history, tokens | body, KiB | CPU ms a turn | grown, MiB | written, bytes a turn | kept, bytes a turn |
|---|---|---|---|---|---|---|
{long_rows}
"""


@dataclass
class Window:
    """Some turns of all episodes, at about the same length of their histories."""

    turns: int
    tokens: int
    body_bytes: int
    cpu_ms: list[float] = field(default_factory=list)
    """A turn, by round."""
    added_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    episode_mib: list[float] = field(default_factory=list)

    def row(self) -> str:
        added, plain = in_ms(self.added_s), in_ms(self.plain_s)
        cells = (
            *(f"{self.turns}", f"{self.tokens:,}", f"{self.body_bytes / 1024:.0f}"),
            *(f"{statistics.median(self.cpu_ms):.1f}", f"{at(added, 0.5):.1f}", f"{at(added, 0.99):.1f}"),
            *(f"{at(plain, 0.5):.1f}", f"{statistics.median(self.episode_mib):.2f}"),
        )
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Crowd:
    cpu_ms: float
    rate: float
    added_ms: Sequence[float]
    plain_ms: Sequence[float]
    tokens: int


@dataclass(frozen=True)
class Look:
    """What a long episode came to, and what its turns cost since the last look."""

    turns: int
    tokens: int
    body_bytes: int
    cpu_ms: float
    grown_bytes: int
    written: float
    kept: float

    def row(self) -> str:
        cells = (
            *(f"{self.turns}", f"{self.tokens:,}", f"{self.body_bytes / 1024:.0f}", f"{self.cpu_ms:.1f}"),
            *(f"{self.grown_bytes / 2**20:.1f}", f"{self.written:,.0f}", f"{self.kept:,.0f}"),
        )
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Streams:
    num_answered: int
    num_tried_again: int
    num_alive: int
    watched_s: float
    idle: float
    episode_kib: float
    stream_kib: float
    quiet_ms: Sequence[float]
    ping_ms: Sequence[float]


def at(values: Sequence[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def in_ms(seconds: Sequence[float]) -> list[float]:
    return [one * 1e3 for one in seconds]


async def pair(gateway: Gateway, episode: Episode, num_read: int) -> tuple[float, float]:
    """Seconds of a turn, and of a plain call with as many ids."""
    episode.read(num_read)
    spent = await episode.turn()
    return spent, await gateway.plain(episode.num_prompt)


async def one_at_a_time(num_episodes: int, num_turns: int, num_read: int, windows: dict[int, Window]) -> None:
    """Adds a round to ``windows``, by the number of turns at their ends."""
    async with open_gateway(turn_tokens=TURN_TOKENS, seconds=(0.05, 0.05), max_episodes=num_episodes) as gateway:
        episodes = await gateway.episodes(num_episodes)
        resident, cpu, size = gateway.process.resident_bytes(), gateway.process.cpu_s(), num_turns // NUM_WINDOWS
        pairs: list[tuple[float, float]] = []
        for turn in range(1, num_turns + 1):
            pairs += [await pair(gateway, episode, num_read) for episode in episodes]
            if turn % size:
                continue
            cpu, before = gateway.process.cpu_s(), cpu
            window = windows.setdefault(turn, Window(turn, episodes[0].num_prompt, len(episodes[0].request())))
            window.cpu_ms.append((cpu - before) / len(pairs) * 1e3)
            window.added_s += [spent - plain for spent, plain in pairs]
            window.plain_s += [plain for _, plain in pairs]
            window.episode_mib.append((gateway.process.resident_bytes() - resident) / num_episodes / 2**20)
            print(window.row(), flush=True)
            pairs = []
        await asyncio.gather(*(episode.end() for episode in episodes))


async def crowd(num_agents: int, num_turns: int, num_read: int) -> Crowd:
    async with open_gateway(turn_tokens=TURN_TOKENS, seconds=(0.5, 0.5), max_episodes=num_agents) as gateway:
        episodes = await gateway.episodes(num_agents)

        async def play(place: int, episode: Episode) -> list[tuple[float, float]]:
            await asyncio.sleep(place / num_agents)  # so that they do not go in step
            return [await pair(gateway, episode, num_read) for _ in range(num_turns)]

        cpu, started = gateway.process.cpu_s(), time.perf_counter()
        played = await asyncio.gather(*(play(place, episode) for place, episode in enumerate(episodes)))
        cpu, took_s = gateway.process.cpu_s() - cpu, time.perf_counter() - started
        pairs = [one for pairs in played for one in pairs]
        await asyncio.gather(*(episode.end() for episode in episodes))
    added, plain = [spent - plain for spent, plain in pairs], [plain for _, plain in pairs]
    return Crowd(cpu / len(pairs) * 1e3, len(pairs) / took_s, in_ms(added), in_ms(plain), episodes[0].num_prompt)


class Stream:
    """One streamed answer that is being waited for. Its client asks again when it is told to, as packages do."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self.num_alive = 0
        self.is_open = asyncio.Event()
        self.is_whole = False
        self.num_tries = 0

    async def read(self) -> None:
        while not self.is_whole and self.num_tries < MAX_TRIES:
            await self._try()
            self.num_tries += 1
            await asyncio.sleep(0 if self.is_whole else 1.0)
        self.is_open.set()

    async def _try(self) -> None:
        episode, body = self._episode, self._episode.request(stream=True)
        address = urlsplit(episode.base_url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        head = (
            f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {episode.key}\r\n"
        )
        head += f"x-stainless-retry-count: {self.num_tries}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        while line := await reader.readline():
            if line.startswith(b":"):
                self.num_alive += 1
            if line.startswith((b":", b"data:")):
                self.is_open.set()
            if line == b"data: [DONE]\n":
                self.is_whole = True
                break
        writer.close()


async def pings(gateway: Gateway, episode: Episode, seconds: float) -> list[float]:
    """How long another request takes meanwhile, in ms."""
    address = urlsplit(gateway.url)
    head = f"GET /v1/models HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {episode.key}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    found: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        started = time.perf_counter()
        writer.write(head)
        length = int((await reader.readuntil(b"\r\n\r\n")).lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        json.loads(await reader.readexactly(length))
        found.append((time.perf_counter() - started) * 1e3)
        await asyncio.sleep(0.05)
    writer.close()
    return found


async def streams(number: int) -> Streams:
    async with open_gateway(turn_tokens=TURN_TOKENS, seconds=(STREAM_S, STREAM_S), max_episodes=number + 8) as gateway:
        empty = gateway.process.resident_bytes()
        episodes = await gateway.episodes(number)
        quiet = await pings(gateway, episodes[0], 5.0)
        held = gateway.process.resident_bytes()
        opened = [Stream(episode) for episode in episodes]
        for episode in episodes:
            episode.read(890)
        reading = []
        for place, one in enumerate(opened):
            reading.append(asyncio.create_task(one.read()))
            await asyncio.sleep(0 if place % OPENED_A_SECOND else 1.0)
        await asyncio.gather(*(one.is_open.wait() for one in opened))
        resident, alive = gateway.process.resident_bytes(), sum(one.num_alive for one in opened)
        cpu, started = gateway.process.cpu_s(), time.perf_counter()
        ping = await pings(gateway, episodes[0], 25.0)
        cpu, watched_s = gateway.process.cpu_s() - cpu, time.perf_counter() - started
        alive = sum(one.num_alive for one in opened) - alive
        await asyncio.gather(*reading)
        return Streams(
            num_answered=sum(one.is_whole for one in opened),
            num_tried_again=sum(one.num_tries > 1 for one in opened),
            num_alive=alive,
            watched_s=watched_s,
            idle=cpu / watched_s,
            episode_kib=(held - empty) / number / 1024,
            stream_kib=(resident - held) / number / 1024,
            quiet_ms=quiet,
            ping_ms=ping,
        )


async def long_episode() -> list[Look]:
    async with open_gateway(turn_tokens=LONG_TOKENS, seconds=(0.005, 0.005), max_episodes=1) as gateway:
        (episode,) = await gateway.episodes(1)
        episode.tools = many_tools(NUM_TOOLS)
        episode.read(1)
        await episode.turn()
        first = gateway.process.resident_bytes()
        cpu, stored = gateway.process.cpu_s(), await Stored.read(gateway)
        looks: list[Look] = []
        for turn in range(2, LONG_TURNS + 1):
            episode.read(1)
            await episode.turn()
            if turn % LOOKED_AT:
                continue
            (cpu, before), (stored, earlier) = (gateway.process.cpu_s(), cpu), (await Stored.read(gateway), stored)
            turns = turn - (looks[-1].turns if looks else 1)
            look = Look(
                turns=turn,
                tokens=episode.num_prompt,
                body_bytes=len(episode.request()),
                cpu_ms=(cpu - before) / turns * 1e3,
                grown_bytes=gateway.process.resident_bytes() - first,
                written=(stored.received - earlier.received) / turns,
                kept=(stored.kept - earlier.kept) / turns,
            )
            looks.append(look)
            print(look.row(), flush=True)
        await episode.end()
    return looks


@dataclass(frozen=True)
class Stored:
    """Bytes that Redis was sent so far, and those that it keeps of the first episode's turns beside its segments."""

    received: int
    kept: int

    @classmethod
    async def read(cls, gateway: Gateway) -> Stored:
        snapshot = await gateway.stage.bus.read_snapshot(EpisodeKey(gateway.claim.job_id, 0, 0))
        kept = 0 if snapshot is None else len(snapshot.data) + sum(map(len, snapshot.parts))
        async with Redis.from_url(gateway.stage.redis_url) as redis:
            return cls((await redis.info("stats"))["total_net_input_bytes"], kept)


def line(windows: Sequence[Window]) -> tuple[float, float]:
    """CPU ms a turn as fixed and for each 1,000 tokens."""
    tokens, cpu = [one.tokens / 1e3 for one in windows], [statistics.median(one.cpu_ms) for one in windows]
    slope, fixed = statistics.linear_regression(tokens, cpu)
    return fixed, slope


def page(
    arguments: argparse.Namespace, windows: Sequence[Window], many: Crowd, held: Streams, long: Sequence[Look]
) -> str:
    fixed, slope = line(windows)
    plain = at(many.plain_ms, 0.5)
    return PAGE.format(
        episodes=arguments.episodes,
        rounds=arguments.rounds,
        streams=arguments.streams,
        turn_tokens=TURN_TOKENS,
        machine=machine(),
        turns="\n".join(one.row() for one in windows),
        fixed=fixed,
        slope=slope,
        long_turns=LENGTHS[-1][0],
        long_read=LENGTHS[-1][1],
        crowd=arguments.crowd,
        crowd_turns=arguments.crowd_turns,
        crowd_tokens=many.tokens,
        crowd_cpu=many.cpu_ms,
        crowd_rate=many.rate,
        crowd_p50=at(many.added_ms, 0.5),
        crowd_p99=at(many.added_ms, 0.99),
        crowd_plain=plain,
        crowd_ratio=(plain + at(many.added_ms, 0.5)) / plain,
        stream_s=STREAM_S,
        opened_a_second=OPENED_A_SECOND,
        answered=held.num_answered,
        tried_again=held.num_tried_again,
        alive=held.num_alive,
        watched=held.watched_s,
        idle=held.idle,
        episode_kib=held.episode_kib,
        stream_kib=held.stream_kib,
        quiet_p50=at(held.quiet_ms, 0.5),
        quiet_p99=at(held.quiet_ms, 0.99),
        ping_p50=at(held.ping_ms, 0.5),
        ping_p99=at(held.ping_ms, 0.99),
        num_tools=NUM_TOOLS,
        long_tokens=LONG_TOKENS,
        long_rows="\n".join(one.row() for one in long),
    )


async def measure(arguments: argparse.Namespace) -> str:
    found: list[Window] = []
    for num_turns, num_read in LENGTHS:
        windows: dict[int, Window] = {}
        for _ in range(arguments.rounds):
            await one_at_a_time(arguments.episodes, num_turns, num_read, windows)
        found += windows.values()
    many = await crowd(arguments.crowd, arguments.crowd_turns, 890)
    return page(arguments, found, many, await streams(arguments.streams), await long_episode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--crowd-turns", type=int, default=10)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--look", action="store_true", help="print only; nothing is stored")
    arguments = parser.parse_args()
    text = asyncio.run(measure(arguments))
    print(text)
    if not arguments.look:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
