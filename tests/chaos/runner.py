"""One chaos run: jobs are submitted without end while faults strike, then all must succeed and everything must leave.

The rule kept here: the run judges nothing that the oracle can judge; it fails by itself only where a run cannot come to
its end (a job that is not over in time, a process that does not leave). Whatever it knows is in its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_core.client import ApiError, Client, ClientError
from tests.chaos.clock import Clock
from tests.chaos.disk import Disk
from tests.chaos.faults import Faults, Hit, described
from tests.chaos.jobs import job_spec
from tests.chaos.processes import marked, stamp
from tests.chaos.report import Recoveries
from tests.chaos.schedule import WEIGHTS, Fault, plan
from tests.chaos.stack import Size, Stack
from tests.chaos.watch import Watch
from tests.chaos.worlds import WORLDS

DISK_MB = 1536
SUBMIT_FOR_S = 120.0
SETTLE_S = 240.0
"""For the jobs to end once nothing strikes any more."""
PROGRESS_S = 15.0
REPEATED_SHARE = 3
"""One submission of so many is made twice under its key."""


@dataclass(frozen=True)
class Options:
    seed: int
    faults: int
    minutes: float
    steps: int = 24
    size: Size = field(default_factory=Size)
    kinds: tuple[str, ...] = ()
    """Only these; empty: all."""
    settle_s: float = SETTLE_S
    worlds: tuple[str, ...] = tuple(world.__name__ for world in WORLDS)


class RunFailed(Exception):
    """The run did not come to its end."""


class Run:
    def __init__(self, work: Path, options: Options) -> None:
        self.work, self.options = work, options
        work.mkdir(parents=True)
        self.disk = Disk(work / "data", DISK_MB)
        self.stack = Stack(work, work / "data", options.size, Clock(work))
        self.watch = Watch(work / "samples.jsonl", lambda: self.stack.redis_url)
        self.faults = Faults(self.stack, self.watch, self.disk)
        self.recoveries = Recoveries()
        self.misses: Counter[str] = Counter()
        self._after: set[asyncio.Task[None]] = set()
        self._num_submitted = 0
        self._is_calm = False
        self._began = time.monotonic()

    async def play(self) -> None:
        """Raises RunFailed."""
        options = self.options
        self._write(
            "run.json",
            {
                "seed": options.seed,
                "options": asdict(options),
                "without": self._without(),
                "data_dir": str(self.disk.place.absolute()),
            },
        )
        await self._make_model()
        try:
            await self.stack.open()
            watching = asyncio.create_task(self.watch.run(), name="watch")
            submitting = asyncio.create_task(self._submit_without_end(), name="submit")
            progress = asyncio.create_task(self._tell_progress(), name="progress")
            try:
                await self._wait_for_first_steps(submitting)
                await self._strike_all(submitting)
                await self._settle(submitting)
            finally:
                for task in (progress, submitting, watching):
                    task.cancel()
                await asyncio.gather(progress, submitting, watching, return_exceptions=True)
            await self._leave()
        finally:
            for task in self._after:
                task.cancel()
            await asyncio.gather(*self._after, return_exceptions=True)
            await self.stack.close()

    def _without(self) -> list[str]:
        return self.faults.impossible()

    async def _make_model(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.chaos.model", str(self.work / "model")
        )
        if await process.wait():
            raise RunFailed("the model could not be made")

    # Jobs

    async def _submit_without_end(self) -> None:
        while True:
            while not self._is_calm and len(self.watch.running()) < self.options.size.jobs:
                await self._submit()
            await asyncio.sleep(0.2)

    async def _submit(self) -> None:
        number = self._num_submitted
        self._num_submitted += 1
        spec = job_spec(number, self.work, self.options.steps, self.options.seed, self.options.worlds)
        key = f"chaos-{self.options.seed}-{number}"
        self._note("submissions.jsonl", key=key, number=number)
        job = await asyncio.to_thread(self._send, spec, key)
        if number % REPEATED_SHARE == 0:
            again = await asyncio.to_thread(self._send, spec, key)
            if again != job:
                raise RunFailed(f"the key {key} made two jobs, {job} and {again}")
        self._note("submissions.jsonl", key=key, accepted=job)
        self.watch.add(job, self.work / "data" / "jobs" / job)

    def _send(self, spec: dict[str, Any], key: str) -> str:
        deadline = time.monotonic() + SUBMIT_FOR_S
        while True:
            try:
                with Client(self.stack.api_url) as client:
                    return client.create_job(spec, idempotency_key=key)["id"]
            except ApiError as error:
                if error.status < 500 or time.monotonic() > deadline:
                    raise RunFailed(f"a job was not accepted: {error}") from error
            except ClientError as error:
                if time.monotonic() > deadline:
                    raise RunFailed(f"a job was not accepted in {SUBMIT_FOR_S:.0f} s: {error}") from error
            time.sleep(0.2)

    async def _wait_for_first_steps(self, submitting: asyncio.Task[None]) -> None:
        deadline = time.monotonic() + self.options.settle_s
        while not any(job.step for job in self.watch.jobs.values()):
            self._check(submitting)
            if time.monotonic() > deadline:
                raise RunFailed("no job took a step before the first fault")
            await asyncio.sleep(0.1)

    # Faults

    async def _strike_all(self, submitting: asyncio.Task[None]) -> None:
        options = self.options
        faults = plan(options.seed, options.faults, 60 * options.minutes, self._left_out())
        began = self._began = time.monotonic()
        for fault in faults:
            self._check(submitting)
            await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
            await self._strike(fault)
        self._is_calm = True

    def _left_out(self) -> set[str]:
        chosen = set(self.options.kinds or WEIGHTS)
        return set(self._without()) | (set(WEIGHTS) - chosen)

    async def _strike(self, fault: Fault) -> None:
        at = time.monotonic()
        outcome = await self.faults.strike(fault.kind, fault.seed)
        if not isinstance(outcome, Hit):
            self.misses[fault.kind] += 1
            self._note("faults.jsonl", number=fault.number, kind=fault.kind, missed=outcome)
            return
        self._note("faults.jsonl", number=fault.number, kind=fault.kind, **described(outcome))
        if outcome.after is not None:
            self._later(outcome.after)
        took = time.monotonic() - at
        self.recoveries.struck(fault.kind)
        jobs = [job for job in outcome.jobs if not self.watch.jobs[job].is_over]
        if jobs:
            self.watch.expect_steps(jobs, lambda seconds: self.recoveries.recovered(fault.kind, seconds + took))

    def _later(self, what: Awaitable[None]) -> None:
        async def do() -> None:
            await what

        task = asyncio.create_task(do())
        self._after.add(task)
        task.add_done_callback(self._after.discard)

    def _check(self, submitting: asyncio.Task[None]) -> None:
        if submitting.done():
            submitting.result()
        for task in list(self._after):
            if task.done() and not task.cancelled() and task.exception() is not None:
                task.result()

    # The end

    async def _settle(self, submitting: asyncio.Task[None]) -> None:
        await asyncio.gather(*self._after)
        deadline = time.monotonic() + self.options.settle_s
        while open_jobs := self.watch.running():
            self._check(submitting)
            if time.monotonic() > deadline:
                still = ", ".join(f"{job.id} at step {job.step} ({job.status})" for job in open_jobs)
                raise RunFailed(f"not over {self.options.settle_s:.0f} s after the last fault: {still}")
            await asyncio.sleep(0.1)

    async def _leave(self) -> None:
        obstinate = await self.stack.leave()
        await self.stack.close()
        left = await self._left_processes()
        end = {
            "crashes": [asdict(crash) for crash in self.stack.nursery.crashes],
            "obstinate": obstinate,
            "statuses": self.stack.nursery.statuses,
            "left_processes": left,
            "num_redis_starts": self.stack.num_redis_starts,
            "recoveries": self.recoveries.to_dict(),
            "misses": dict(self.misses),
            "seconds": time.monotonic() - self._began,
            "num_steps": self.watch.num_steps,
        }
        self._write("end.json", end)

    async def _left_processes(self) -> dict[int, str]:
        """The hosts of a worker that was killed look after themselves; that may take them a moment."""
        deadline = time.monotonic() + 20.0
        while (left := marked(self.stack.mark)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return left

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            over = [job for job in self.watch.jobs.values() if job.is_over]
            now = ", ".join(f"{job.step}" for job in self.watch.running())
            print(
                f"{time.monotonic() - self._began:6.0f} s  {self.recoveries.total()} faults, {self.watch.num_steps} "
                f"steps, {len(over)} jobs over, at step {now or '-'}, {len(self.stack.nursery.crashes)} crashes",
                flush=True,
            )

    def _note(self, name: str, **record: Any) -> None:
        with (self.work / name).open("ab") as file:
            file.write(stamp(**record) + b"\n")

    def _write(self, name: str, record: dict[str, Any]) -> None:
        (self.work / name).write_text(json.dumps(record, indent=1))

    def keep(self) -> None:
        """What was in memory goes to the disk, for somebody to look at."""
        with contextlib.suppress(OSError, shutil.Error):
            self.disk.close(keep_at=self.work / "kept")
