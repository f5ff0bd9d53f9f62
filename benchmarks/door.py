"""What do clients cost that only hold on? ``python -m benchmarks.door``: 1,000 event streams and 2,000 heads that never
end at one API, and what each other request costs the server meanwhile, beside the same API with nobody else.

It is the server's CPU seconds that count, from ``/proc``, not the clock: client and server share the cores. What the
holders cost by themselves is measured in a window without requests and taken off. Then it asks for more streams than
one key, and than all keys, may have, and looks at every refusal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.process.children import die_with_parent
from services.state.client import connect
from services.state.server import RedisServer
from services.state.store import Store

RESULTS = Path(__file__).with_name("results") / "door.md"
SPEC = '{"name": "door", "model": "m", "environments": [{"ref": "environments.calculator:Calculator"}], "steps": 10}'
NUM_STREAMS, NUM_HEADS, NUM_KEYS = 1000, 2000, 8
TRICKLE_S = 2.0
BEHIND_S = 6.0
HEAD_S = 20.0
"""As the server has it: heads begin evenly over it, so that they end evenly."""
AIM = 1.5
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Api:
    url: str
    pid: int
    keys: Sequence[str]
    job: str

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024

    def get(self, path: str, key: str, accept: str = "*/*") -> bytes:
        host, port = self.address
        return (
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\nAccept: {accept}\r\n\r\n"
        ).encode()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines) if name}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(first.split()[1]), headers, body


@dataclass
class Holders:
    """Clients that hold on to the API until they are let go."""

    api: Api
    ends: Counter[str] = field(default_factory=Counter)
    """Of the heads."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def streams(self, count: int, keys: Sequence[str]) -> Counter[str]:
        """Open so many; what became of each."""
        fates: Counter[str] = Counter()
        for number in range(count):
            reader, writer = await asyncio.open_connection(*self.api.address)
            path = f"/v1/jobs/{self.api.job}/events"
            writer.write(self.api.get(path, keys[number % len(keys)], "text/event-stream"))
            status, headers, body = await read_answer(reader)
            if status == 200:
                self.writers.append(writer)
                fates["served"] += 1
                continue
            error = json.loads(body)["error"]
            is_clean = "retry-after" in headers and {"type", "code", "message", "request_id"} <= error.keys()
            fates[f"{status} {error['code']}{'' if is_clean else ', not clean'}"] += 1
            writer.close()
        return fates

    def heads(self, count: int) -> None:
        self.tasks += [asyncio.create_task(self._head(number)) for number in range(count)]

    async def _head(self, number: int) -> None:
        await asyncio.sleep(number * HEAD_S / NUM_HEADS)
        while True:
            try:
                reader, writer = await asyncio.open_connection(*self.api.address)
            except OSError:
                self.ends["no connection"] += 1
                await asyncio.sleep(1)
                continue
            writer.write(b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            end = asyncio.create_task(reader.read())
            try:
                while not (await asyncio.wait({end}, timeout=TRICKLE_S))[0]:
                    writer.write(b"x")
                said = end.result()
                self.ends["408, in words" if said.startswith(b"HTTP/1.1 408") else "closed"] += 1
            except OSError:
                self.ends["closed"] += 1
            finally:
                end.cancel()
                writer.close()

    async def let_go(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for writer in self.writers:
            writer.close()
        self.tasks, self.writers = [], []


async def ask(api: Api, count: int) -> None:
    """Requests one after the other on one connection, with a key of their own."""
    reader, writer = await asyncio.open_connection(*api.address)
    for _ in range(count):
        writer.write(api.get(f"/v1/jobs/{api.job}", api.keys[-1]))
        status, _, body = await read_answer(reader)
        assert status == 200, body
        await asyncio.sleep(0.012)  # within what one key may ask
    writer.close()


async def window(api: Api, count: int) -> tuple[float, float]:
    """CPU milliseconds of each of ``count`` requests, and the share of a core that the rest took."""

    async def quiet() -> float:
        began, cpu = time.monotonic(), api.cpu_s()
        await asyncio.sleep(BEHIND_S)
        return (api.cpu_s() - cpu) / (time.monotonic() - began)

    before = await quiet()
    began, cpu = time.monotonic(), api.cpu_s()
    await ask(api, count)
    used, took = api.cpu_s() - cpu, time.monotonic() - began
    rest = (before + await quiet()) / 2
    return 1000 * (used - rest * took) / count, rest


async def measure(api: Api, rounds: int, count: int) -> list[str]:
    holders, costs = Holders(api), list[tuple[float, float]]()
    lines = [f"- nobody else: {api.rss_mib():.0f} MiB"]
    await ask(api, count)  # warm
    for _ in range(rounds):
        idle, _ = await window(api, count)
        opened = await holders.streams(NUM_STREAMS, api.keys[:NUM_KEYS])
        holders.heads(NUM_HEADS)
        await asyncio.sleep(HEAD_S + 5.0)
        held, rest = await window(api, count)
        costs.append((idle, held))
        memory = api.rss_mib()
        print(f"{idle:.2f} ms, {held:.2f} ms, rest {rest:.3f}, {memory:.0f} MiB, {dict(opened)}", flush=True)
        await holders.let_go()
        await asyncio.sleep(3.0)
    ratio = statistics.median(held / idle for idle, held in costs)
    lines += [
        f"- with {NUM_STREAMS:,} streams ({dict(opened)}) and {NUM_HEADS:,} slow heads: {memory:.0f} MiB, and "
        f"{rest:.1%} of a core for them",
        f"- CPU of a request: {statistics.median(one for one, _ in costs):.2f} ms with nobody else, "
        f"{statistics.median(one for _, one in costs):.2f} ms beside them; median of the {rounds} pairs' ratios "
        f"**{ratio:.2f}** (aim: at most {AIM}; pairs: {', '.join(f'{held / idle:.2f}' for idle, held in costs)})",
        f"- how the heads ended meanwhile, opened again each time: {dict(holders.ends)}",
        f"- 400 streams of one key: {dict(await holders.streams(400, api.keys[:1]))}",
    ]
    await holders.let_go()
    await asyncio.sleep(3.0)
    lines.append(f"- 1,200 streams of {NUM_KEYS} keys: {dict(await holders.streams(1200, api.keys[:NUM_KEYS]))}")
    await holders.let_go()
    return lines


async def run(rounds: int, count: int) -> list[str]:
    keys = [f"door-{number}-{'k' * 40}" for number in range(NUM_KEYS + 1)]
    with tempfile.TemporaryDirectory() as folder, RedisServer.spawn(Path(folder) / "redis") as server:
        async with connect(server.url) as redis:
            store = Store(redis)
            await store.load_functions()
            job = await store.jobs.create(SPEC)
            api, process = await started(server.url, folder, keys, job.id)
            try:
                return await measure(api, rounds, count)
            finally:
                process.terminate()
                await process.wait()


async def started(redis: str, folder: str, keys: Sequence[str], job: str) -> tuple[Api, asyncio.subprocess.Process]:
    settings: dict[str, Any] = {"GSPO_REDIS_URL": redis, "GSPO_DATA_DIR": f"{folder}/data", "GSPO_API_PORT": "0"}
    settings |= {"GSPO_API_KEYS": ",".join(keys), "GSPO_LOG_FORMAT": "json", "GSPO_LOG_LEVEL": "info"}
    log = Path(folder) / "api.log"
    with log.open("wb") as out:
        command = (sys.executable, "-m", "services.api")
        process = await asyncio.create_subprocess_exec(
            *command, env=os.environ | settings, stdout=out, stderr=out, preexec_fn=die_with_parent()
        )
    async with asyncio.timeout(120):
        while not (found := [line for line in log.read_text().splitlines() if '"listening"' in line]):
            await asyncio.sleep(0.1)
    return Api(json.loads(found[0])["url"], process.pid, keys, job), process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000, help="in each window")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard == resource.RLIM_INFINITY else min(hard, 16384), hard))
    load = os.getloadavg()[0]
    lines = asyncio.run(run(options.rounds, options.requests))
    head = (
        "# Clients that only hold on\n\nWritten by `python -m benchmarks.door`: one API, one key a request, "
        f"{options.requests:,} requests in a window, {options.rounds} pairs; {platform.machine()}, {os.cpu_count()} "
        f"cores shared with the clients, load {load:.1f} at the start; Python {platform.python_version()}.\n\n"
    )
    RESULTS.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    print(head + "\n".join(lines))


if __name__ == "__main__":
    main()
