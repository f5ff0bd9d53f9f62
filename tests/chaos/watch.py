"""What a run sees of its jobs while they run: their steps, from their own files, and samples for the oracle.

The rule kept here: what a later fault could wipe out (counters in Redis, names of checkpoints that are removed again)
is written down as it is seen, one line each, and judged by nobody here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.files.job_dir import JobDir
from services.files.job_records import JobRecords
from services.state.client import Away, RedisClient, RedisFault
from services.state.jobs import JobStatus
from services.state.queue import Bus
from tests.chaos.processes import stamp

LOOK_S = 0.05
SAMPLE_S = 0.5


def impatient(redis_url: str) -> RedisClient:
    """A client that does not wait for a server that is away."""
    client = RedisClient.from_url(redis_url, protocol=2, socket_timeout=2.0, retry=None)
    assert isinstance(client, RedisClient)
    return client


@dataclass
class WatchedJob:
    id: str
    directory: Path
    step: int = 0
    is_over: bool = False
    status: str = ""
    is_of_agents: bool = False
    is_extra: bool = False
    """It is there to be given up: no fault is recovered from by its steps."""
    num_read: int = 0
    names: list[str] = field(default_factory=list)
    rest: bytes = b""


@dataclass
class Wait:
    """For the next step of each of some jobs."""

    begun: float
    steps: dict[str, int]
    done: Callable[[float], None]


class Watch:
    def __init__(self, journal: Path, redis_url: Callable[[], str]) -> None:
        self._journal = journal
        self._redis_url = redis_url
        self.jobs: dict[str, WatchedJob] = {}
        self._waits: list[Wait] = []
        self._letters: set[tuple[str, str]] = set()
        """Dead letters that are written down."""
        self.num_steps = 0

    def add(self, job: str, directory: Path, *, is_of_agents: bool = False, is_extra: bool = False) -> None:
        self.jobs[job] = WatchedJob(job, directory, is_of_agents=is_of_agents, is_extra=is_extra)

    def open(self) -> list[WatchedJob]:
        return [job for job in self.jobs.values() if not job.is_over]

    def running(self) -> list[WatchedJob]:
        """Those that have to come to their end."""
        return [job for job in self.open() if not job.is_extra]

    def expect_steps(self, jobs: list[str], done: Callable[[float], None]) -> None:
        """``done`` is told after how long each of ``jobs`` had ended a step, or itself."""
        self._waits.append(Wait(time.monotonic(), {job: self.jobs[job].step for job in jobs}, done))

    async def run(self) -> None:
        sampling = asyncio.create_task(self._sample(), name="sampling")
        try:
            while True:
                for job in self.open():
                    self._look(job)
                now = time.monotonic()
                for wait in [one for one in self._waits if self._is_over(one)]:
                    self._waits.remove(wait)
                    wait.done(now - wait.begun)
                await asyncio.sleep(LOOK_S)
        finally:
            sampling.cancel()

    def _is_over(self, wait: Wait) -> bool:
        return all(self.jobs[job].is_over or self.jobs[job].step > step for job, step in wait.steps.items())

    def _look(self, job: WatchedJob) -> None:
        with contextlib.suppress(FileNotFoundError), (job.directory / "metrics.jsonl").open("rb") as file:
            file.seek(job.num_read)
            data = file.read()
            *lines, _ = data.split(b"\n")
            job.num_read += sum(len(line) + 1 for line in lines)
            for line in lines:
                with contextlib.suppress(ValueError):
                    step = json.loads(line).get("step", 0)
                    self.num_steps += step > job.step
                    job.step = max(job.step, step)
        with contextlib.suppress(FileNotFoundError):
            names = sorted(entry.name for entry in (job.directory / "checkpoints").iterdir() if entry.name[0] != ".")
            if names != job.names:
                job.names = names
                self._write(kind="checkpoints", job=job.id, names=names)
        status = JobRecords(JobDir(job.directory)).newest_status()[1].get("status", "")
        if status and status != job.status:
            job.status = status
            job.is_over = JobStatus(status).is_terminal

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            with contextlib.suppress(Away, RedisFault):
                async with impatient(self._redis_url()) as redis:
                    for job in self.open():
                        await self._sample_queue(Bus(redis), job.id)

    async def _sample_queue(self, bus: Bus, job: str) -> None:
        self._write(kind="counters", job=job, counters=await bus.counters(job))
        for letter in await bus.dead_letters(job):
            if (job, letter.id) not in self._letters:
                self._letters.add((job, letter.id))
                key = {"group": letter.key.group, "member": letter.key.member}
                self._write(kind="dead letter", job=job, reason=letter.reason, **key)

    def _write(self, **record: object) -> None:
        with self._journal.open("ab") as file:
            file.write(stamp(**record) + b"\n")
