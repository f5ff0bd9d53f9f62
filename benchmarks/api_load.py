"""How does the API answer while many watch? Event streams, a steady rate of requests, and a job that writes events.

``python -m benchmarks.api_load --readers 200 --rate 300 --seconds 20`` starts a Redis and an API of its own, prints
latencies by quantile and counts events that a reader missed or saw twice; ``--job 40`` starts a whole stack instead,
with a job that learns. All of it shares the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from examples.demo.demo import NO_KEYS, demo_spec
from examples.demo.model import make_demo_model
from gspo_core.client import Client
from gspo_core.server_events import parse_events
from services.launch.stack import Stack, StackConfig, claim_port
from services.process.children import die_with_parent
from services.state.client import connect
from services.state.jobs import JobStatus
from services.state.server import RedisServer
from services.state.store import Claim, Store

SPEC = '{"name": "load", "model": "m", "environments": [{"ref": "environments.calculator:Calculator"}], "steps": 1000}'
PATHS = ("/v1/jobs", "/v1/jobs/{job}", "/v1/jobs/{job}/metrics?max_points=100", "/v1/workers", "/healthz")
# A step of a small job, and what else it says.
EVENTS_PER_S = 2.0
# As the stream tells its readers.
RETURN_S = 2.0


@dataclass(frozen=True)
class Target:
    url: str
    pid: int
    """Of the API."""
    store: Store
    job: str
    work: Callable[[], Coroutine[Any, Any, None]]
    """What writes events; returns when the job is over."""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=200, help="event streams that are held open")
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--job", type=int, metavar="STEPS", help="beside a real job of so many steps, on the same cores"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        opened = _real(Path(folder), options.job) if options.job else _written(Path(folder), options.seconds)
        async with opened as target:
            await _load(target, options)


@asynccontextmanager
async def _written(folder: Path, seconds: float) -> AsyncIterator[Target]:
    """Redis and an API; the events are those of a job that nobody computes."""
    url = f"http://127.0.0.1:{claim_port('127.0.0.1', 0)}"
    with RedisServer.spawn(folder / "redis") as redis_server:
        api = _start_api(redis_server.url, url, str(folder))
        try:
            async with connect(redis_server.url) as redis:
                await _until_ready(url)
                store = Store(redis)
                job = await store.jobs.create(SPEC)
                claim = await store.jobs.claim("load")
                assert claim is not None
                await store.jobs.set_status(job.id, JobStatus.RUNNING, token=claim.token)
                yield Target(url, api.pid, store, job.id, lambda: _write(store, claim, seconds))
        finally:
            api.terminate()
            api.wait()


@asynccontextmanager
async def _real(folder: Path, steps: int) -> AsyncIterator[Target]:
    """The whole stack, and the job of the demo from its first step on."""
    model_dir = folder / "model"
    make_demo_model(model_dir)
    config = StackConfig(folder / "data", model_dir, port=0, environment=NO_KEYS)
    with Stack(config) as stack:
        async with connect(stack.redis_url) as redis:
            store = Store(redis)
            with Client(stack.api_url) as client:
                job = client.create_job(demo_spec(model_dir, 0, steps))["id"]
            while not any(event.type == "step" for event in await store.events.read(job, "0", count=1000)):
                stack.check()
                await asyncio.sleep(0.2)

            async def until_over() -> None:
                while not (await store.jobs.get(job)).status.is_terminal:
                    await asyncio.sleep(0.5)

            yield Target(stack.api_url, stack.pids()["api"], store, job, until_over)


async def _load(target: Target, options: argparse.Namespace) -> None:
    before = _cpu_s(target.pid), time.process_time()
    at_start = os.getloadavg()[0]
    lines = _Lines(target.url)
    readers = [_Reader(lines, target.job) for _ in range(options.readers)]
    reading = [asyncio.create_task(reader.run()) for reader in readers]
    working = asyncio.create_task(target.work())
    latencies, failures = await _ask(lines, target.job, options.rate, options.seconds)
    used = _cpu_s(target.pid) - before[0], time.process_time() - before[1]
    await working
    seen = await asyncio.gather(*reading)
    wanted = [event.id for event in await target.store.events.read(target.job, "0", count=20_000)]
    p50, p95, p99 = np.quantile(latencies, (0.5, 0.95, 0.99)) * 1000
    print(f"{options.readers} readers, {len(latencies) / options.seconds:.0f} requests/s for {options.seconds:g} s")
    print(f"latency ms: p50 {p50:.1f}  p95 {p95:.1f}  p99 {p99:.1f}  longest {max(latencies) * 1000:.1f}")
    print(f"failed requests: {failures} of {len(latencies)}")
    print(f"events: {len(wanted)} written, readers that missed or doubled one: {sum(ids != wanted for ids in seen)}")
    print(f"streams that were cut, and come back to: {sum(reader.num_returns for reader in readers)}")
    print(f"CPU seconds: API {used[0]:.1f}, this client {used[1]:.1f}; load of the machine {at_start:.1f} at the start")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Lines:
    """Connections that are kept open, with as little around them as will do: a client takes from who it measures."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").partition(":")
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get(self, path: str) -> int:
        """The status of a whole answer."""
        reader, writer = self._idle.pop() if self._idle else await self.open()
        head = await self.send(reader, writer, path, "")
        length = next(int(line.split(b":")[1]) for line in head if line.lower().startswith(b"content-length:"))
        await reader.readexactly(length)
        self._idle.append((reader, writer))
        return int(head[0].split()[1])

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, int(self._port))

    async def send(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, headers: str
    ) -> list[bytes]:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{headers}\r\n".encode())
        return (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")


class _Reader:
    """One client of the event stream, which comes back where it was cut, as clients do."""

    def __init__(self, lines: _Lines, job: str) -> None:
        self._lines = lines
        self._job = job
        self._pieces: list[bytes] = []
        self.num_returns = 0

    async def run(self) -> list[str]:
        """The ids of all events."""
        while not await self._read():
            self.num_returns += 1
            await asyncio.sleep(RETURN_S)
        return self._ids()

    async def _read(self) -> bool:
        """Whether the job is over; what came is looked at only then, or when the stream was cut."""
        after = (self._ids() or ["0"])[-1]
        reader, writer = await self._lines.open()
        wanted = f"Accept: text/event-stream\r\nLast-Event-ID: {after}\r\n"
        try:
            head = await self._lines.send(reader, writer, f"/v1/jobs/{self._job}/events", wanted)
            if head[0].split()[1] != b"200":
                return False
            while size := int(await reader.readline(), 16):
                self._pieces.append(await reader.readexactly(size))
                await reader.readexactly(2)
        except (OSError, EOFError, ValueError):
            return False
        finally:
            writer.close()
        return self._pieces[-1].startswith(b"event: end")

    def _ids(self) -> list[str]:
        text = b"".join(self._pieces).decode().split("\n")
        return [event.id for event in parse_events(text) if event is not None and event.type != "end"]


async def _write(store: Store, claim: Claim, seconds: float) -> None:
    for step in range(1, int(seconds * EVENTS_PER_S) + 1):
        metrics = {f"metric/{number}": float(step) for number in range(60)}
        await store.metrics.add(claim.job_id, step, metrics)
        await store.events.add(claim.job_id, "step", {"step": step, **metrics})
        await asyncio.sleep(1 / EVENTS_PER_S)
    await store.jobs.set_status(claim.job_id, JobStatus.SUCCEEDED, token=claim.token)


async def _ask(lines: _Lines, job: str, rate: float, seconds: float) -> tuple[list[float], int]:
    """An open loop: a slow answer does not slow the asking down. Latency counts from when the request was due."""
    latencies: list[float] = []
    failures = 0

    async def one(path: str, due: float) -> None:
        nonlocal failures
        try:
            failures += await lines.get(path.format(job=job)) != 200
        except (OSError, EOFError):
            failures += 1
        latencies.append(time.perf_counter() - due)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, path in zip(range(int(rate * seconds)), itertools.cycle(PATHS), strict=False):
            due = begun + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(one(path, due))
    return latencies, failures


def _start_api(redis_url: str, url: str, folder: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
    environment |= {"GSPO_REDIS_URL": redis_url, "GSPO_API_PORT": url.rsplit(":", 1)[1], "GSPO_DATA_DIR": folder}
    environment |= {"GSPO_LOG_LEVEL": "warning"}
    return subprocess.Popen([sys.executable, "-m", "services.api"], env=environment, preexec_fn=die_with_parent())


async def _until_ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(60):
        while True:
            try:
                if (await http.get(f"{url}/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
