"""Whether one large body holds up a gateway's open streams: `python -m benchmarks.gateway_load`.

A real gateway process before real Redis, an engine that only waits, and open streams. Another request of the smallest
kind (`GET /v1/models`) is asked every 10 ms on a connection of its own, from a process of its own: it waits for the
event loop and is answered without any other work, so what it takes is the loop's lag and the machine's. Meanwhile a
body of the largest size comes, in several shapes, and then a history of 100,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import multiprocessing
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from benchmarks.gateway import OPENED_A_SECOND, TURN_TOKENS, Stream, at
from benchmarks.gateway_stage import TOOL, Episode, Gateway, open_gateway, words
from benchmarks.rollout_stage import machine
from services.gateway.http.bodies import MAX_BODY_BYTES

RESULTS = Path(__file__).with_name("results") / "gateway_load.md"
STREAM_S = 240.0
EVERY_S = 0.01
QUIET_S = 10.0

PAGE = """# Open streams, and one large body

Written by `python -m benchmarks.gateway_load --streams {streams}` at {commit}, {date}: one process
`python -m services.gateway`, Redis with `appendfsync always`, an engine that waits. {machine}. {open} of {streams}
streams were open. `GET /v1/models` every 10 ms from a process of its own: what it takes is the lag of the gateway's
event loop, and of a machine whose two cores the gateway, its threads and the clients share. A request that waits longer
than 10 ms counts for those that would have been asked meanwhile, too. Beside it, how much later that process woke than
it had asked for: the machine's own lag.

| what comes | body, MiB | answer | it took, s | lag p50 ms | p99 ms | largest ms | machine p99 ms | largest ms |
|---|---|---|---|---|---|---|---|---|
{rows}

The process held {before:.0f} MiB when its streams were open, and {most:.0f} MiB at most.
"""


@dataclass(frozen=True)
class Arrival:
    """What a body met, and what others met meanwhile."""

    name: str
    num_bytes: int
    answer: str
    took_s: float
    lags_ms: list[float]
    late_ms: list[float]
    """The machine's own."""

    def row(self) -> str:
        lags, late = self.lags_ms, self.late_ms
        numbers = (at(lags, 0.5), at(lags, 0.99), max(lags), at(late, 0.99), max(late))
        cells = (self.name, f"{self.num_bytes / 2**20:.1f}", self.answer, f"{self.took_s:.1f}")
        return f"| {' | '.join((*cells, *(f'{one:.1f}' for one in numbers)))} |"


@contextlib.asynccontextmanager
async def pinging(gateway: Gateway, episode: Episode) -> AsyncIterator[tuple[list[float], list[float]]]:
    """How long each of them took, and how late it began (ms), once it is over; it begins and ends with half a second
    alone."""
    found_ms: tuple[list[float], list[float]] = [], []
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ping, args=(sender, gateway.url, episode.key))
    process.start()
    try:
        await asyncio.to_thread(receiver.recv)
        await asyncio.sleep(0.5)
        yield found_ms
        await asyncio.sleep(0.5)
        receiver.send(None)
        for known, more in zip(found_ms, await asyncio.to_thread(receiver.recv), strict=True):
            known += more
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


def ping(pipe: Connection, url: str, key: str) -> None:
    """Asks for next to nothing, again and again, until it is told to stop."""
    address, found_ms, late_ms = urlsplit(url), list[float](), list[float]()
    head = f"GET /v1/models HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        pipe.send(None)
        answers = connection.makefile("rb")
        while not pipe.poll():
            started = time.perf_counter()
            connection.sendall(head)
            size = 0
            while (line := answers.readline().lower()) != b"\r\n":
                size = int(line.partition(b":")[2]) if line.startswith(b"content-length:") else size
            answers.read(size)
            waited_ms = (time.perf_counter() - started) * 1e3
            while waited_ms > 0:
                found_ms.append(waited_ms)
                waited_ms -= EVERY_S * 1e3
            asleep = time.perf_counter()
            time.sleep(EVERY_S)
            late_ms.append((time.perf_counter() - asleep - EVERY_S) * 1e3)
    pipe.send((found_ms, late_ms))


def asking(messages: list[dict[str, object]]) -> bytes:
    return msgspec.json.encode({"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 16})


def many_messages() -> bytes:
    """About 8 kB each, as files and outputs of tools are."""
    pairs = MAX_BODY_BYTES // 2**14 - 8
    text = words(1900)[:8000]
    messages: list[dict[str, object]] = []
    for number in range(pairs):
        messages.append({"role": "user", "content": f"{number} {text}"})
        messages.append({"role": "assistant", "content": f"{number} {text}"})
    return asking([*messages, {"role": "user", "content": "and now?"}])


def one_text(role: str = "user") -> bytes:
    return asking([{"role": role, "content": words(MAX_BODY_BYTES // 5)[: MAX_BODY_BYTES - 4096]}, *BEHIND[role]])


# What a history ends with that has one text of this role.
BEHIND: dict[str, list[dict[str, object]]] = {"user": [], "assistant": [{"role": "user", "content": "and now?"}]}


def empty_lists() -> bytes:
    return b"[" + b"[]," * (MAX_BODY_BYTES // 3 - 2) + b"[]]"


SHAPES: dict[str, Callable[[], bytes]] = {
    "a history of 2,000 messages": many_messages,
    "one text": one_text,
    "one text of the assistant's": partial(one_text, "assistant"),
    "empty lists": empty_lists,
}


async def post(gateway: Gateway, key: str, body: bytes) -> str:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    answer = await gateway.http.ask("POST", f"{gateway.url}/chat/completions", headers, body, httpx.Timeout(600))
    if answer.status_code == 200:
        return "200"
    return f"{answer.status_code} {json.loads(answer.content)['error']['code']}"


async def arrival(gateway: Gateway, episode: Episode, name: str, body: bytes) -> Arrival:
    async with pinging(gateway, episode) as found_ms:
        started = time.perf_counter()
        if body:
            asked = asyncio.create_task(post(gateway, episode.key, body))
            done, _ = await asyncio.wait({asked}, timeout=120)
            answer = asked.result() if done else "held"
            asked.cancel()
        else:
            await asyncio.sleep(QUIET_S)
            answer = ""
        took_s = time.perf_counter() - started
    found = Arrival(name, len(body), answer, took_s, *found_ms)
    print(found.row(), flush=True)
    return found


async def measure(num_streams: int) -> tuple[int, list[Arrival], tuple[float, float]]:
    """Beside what arrived: how many streams were open, and MiB of memory before and at most."""
    bodies = {name: make() for name, make in SHAPES.items()}
    seconds = (STREAM_S, STREAM_S)
    async with open_gateway(turn_tokens=TURN_TOKENS, seconds=seconds, max_episodes=num_streams + 8) as gateway:
        episodes = await gateway.episodes(num_streams + 1)
        *listening, asks = episodes
        opened = [Stream(episode) for episode in listening]
        for episode in listening:
            episode.read(890)
        reading = []
        for place, one in enumerate(opened):
            reading.append(asyncio.create_task(one.read()))
            await asyncio.sleep(0 if place % OPENED_A_SECOND else 1.0)
        await asyncio.gather(*(one.is_open.wait() for one in opened))
        before = gateway.process.resident_bytes()
        found = [await arrival(gateway, asks, "nothing", b"")]
        for name, body in bodies.items():
            found.append(await arrival(gateway, asks, name, body))
        found.append(await counted(gateway, asks, "one text, counted", words(MAX_BODY_BYTES // 6)))
        found.append(await counted(gateway, asks, "a text of 100,000 tokens, counted", words(100_000)))
        num_open = sum(not one.is_whole for one in opened)
        for task in reading:
            task.cancel()
        return num_open, found, (before / 2**20, gateway.process.most_resident_bytes() / 2**20)


async def counted(gateway: Gateway, episode: Episode, name: str, text: str) -> Arrival:
    """The prompt that it becomes, which is made in the same way."""
    body = msgspec.json.encode({"model": "policy", "messages": [{"role": "user", "content": text}]})
    headers = {"Authorization": f"Bearer {episode.key}", "Content-Type": "application/json"}
    url = f"{gateway.url}/messages/count_tokens"
    async with pinging(gateway, episode) as found_ms:
        started = time.perf_counter()
        answer = await gateway.http.ask("POST", url, headers, body, httpx.Timeout(600))
        took_s = time.perf_counter() - started
    read = json.loads(answer.content)
    told = f"{read['input_tokens']:,} tokens" if answer.status_code == 200 else read["error"]["type"]
    found = Arrival(name, len(body), f"{answer.status_code}, {told}", took_s, *found_ms)
    print(found.row(), flush=True)
    return found


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--look", action="store_true", help="print only; nothing is stored")
    arguments = parser.parse_args()
    num_open, found, (before, most) = asyncio.run(measure(arguments.streams))
    page = PAGE.format(
        streams=arguments.streams,
        open=num_open,
        commit=commit(),
        date=datetime.date.today().isoformat(),
        machine=machine(),
        rows="\n".join(one.row() for one in found),
        before=before,
        most=most,
    )
    print(page)
    if not arguments.look:
        RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
