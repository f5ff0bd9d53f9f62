"""One chaos run: jobs are submitted without end while faults strike, then all must succeed and everything must leave.

The rule kept here: the run judges nothing that the oracle can judge; it fails by itself only where a run cannot come to
its end (a job that is not over in time, a process that does not leave). Whatever it knows is in its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.clock import Clock
from tests.chaos.coverage import Coverage
from tests.chaos.disk import Disk
from tests.chaos.evidence import Evidence
from tests.chaos.faults import Faults, Hit, described
from tests.chaos.hostile import FIRST_HOSTILE, PROMISED, is_possible, keep_hostile, made_hostile
from tests.chaos.jobs import NUM_KINDS, ON_STALE, PLAYERS, TRANSPORTS, job_spec, kinds_of
from tests.chaos.judge_hostile import tried
from tests.chaos.model import PLAIN, WITH_DROPOUT
from tests.chaos.patience import Name, State, answers, episodes, recovered
from tests.chaos.processes import marked, stamp
from tests.chaos.report import Recoveries
from tests.chaos.schedule import FROM_DISK, OVER_GROUP, WEIGHTS, Fault, plan
from tests.chaos.stack import AGENT_PYTHON, Size, Stack
from tests.chaos.users import RunFailed, RunLate, Users
from tests.chaos.watch import Watch, impatient
from tests.chaos.worlds import WORLDS

DISK_MB = 1536
SETTLE_S = 240.0
"""From one step of any job to the next, once nothing strikes any more."""
PROGRESS_S = 15.0
RACED_SHARE = 2
"""One submission of so many is made through every API at once, under one key."""
RACED = "submission raced"
ONCE_MORE_S = 600.0
"""After the schedule, for the kinds of it that have found nobody so far. It ends when they have; on a slow machine the
call of an engine that one of them waits for may come only with the next job."""


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
    transports: tuple[str, ...] = TRANSPORTS
    """Of weights to engines."""
    least_jobs: int = NUM_KINDS
    players: str = PLAYERS[0]
    """Of jobs: worlds, agents, or both in turn."""
    on_stale: tuple[str, ...] = ON_STALE
    """What their jobs say of tokens that are too old, in turn."""
    hostile: bool = False
    """A job beside them whose world attacks."""
    is_patient: bool = False
    """The next fault waits until what the one before struck has recovered."""


class Run:
    def __init__(self, work: Path, options: Options) -> None:
        self.work, self.options = work, options
        work.mkdir(parents=True)
        self.disk = Disk(work / "data", DISK_MB)
        has_agents = options.players != PLAYERS[0] and AGENT_PYTHON.exists()
        self._players = options.players if has_agents else PLAYERS[0]
        self.stack = Stack(work, work / "data", replace(options.size, has_agents=has_agents), Clock(work))
        self._is_hostile = options.hostile and is_possible()
        self.watch = Watch(work / "samples.jsonl", lambda: self.stack.redis_url)
        self.faults = Faults(self.stack, self.watch, self.disk, self._happened)
        self.users = Users(self.stack, self.watch, options.seed, self._spec, self._note)
        self.coverage = Coverage(self._promised())
        self._kinds: dict[str, set[str]] = {}
        """Job -> what it is an example of."""
        self.recoveries = Recoveries()
        self.misses: Counter[str] = Counter()
        self._after: set[asyncio.Task[None]] = set()
        self._num_submitted = 0
        self._is_submitting = False
        """A job that may be accepted and that nobody watches yet."""
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
        missing = self._players != self.options.players
        no_wall = self.options.hostile and not self._is_hostile
        return [*self.faults.impossible(), *(["agents"] if missing else []), *(["hostile"] if no_wall else [])]

    def _promised(self) -> set[str]:
        """By the flags of this run, of what this machine allows."""
        jobs = range(self.options.least_jobs)
        found: set[str] = set().union(*(kinds_of(self._spec(number)) for number in jobs))
        if self.options.least_jobs and self.options.size.apis > 1:
            found.add(RACED)
        return found | {fault.kind for fault in self._plan()} | (PROMISED if self._is_hostile else set())

    def _plan(self) -> list[Fault]:
        options = self.options
        return plan(options.seed, options.faults, 60 * options.minutes, self._left_out())

    async def _make_model(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.model", str(self.work / PLAIN), str(self.work / WITH_DROPOUT))
        )
        if await process.wait():
            raise RunFailed("the model could not be made")

    # Jobs

    async def _submit_without_end(self) -> None:
        while True:
            while self._wants_jobs and len(self.watch.running()) < self.options.size.jobs:
                await self._submit()
            await asyncio.sleep(0.2)

    @property
    def _wants_jobs(self) -> bool:
        return not self._is_calm or self._num_submitted < self.options.least_jobs

    async def _submit(self) -> None:
        number = self._num_submitted
        self._num_submitted += 1
        is_raced = number % RACED_SHARE == 0
        self._is_submitting = True
        job = await self.users.submit(number, is_raced=is_raced)
        self._is_submitting = False
        self._kinds[job] = kinds_of(self._spec(number)) | (
            {RACED} if is_raced and self.options.size.apis > 1 else set()
        )

    def _spec(self, number: int) -> dict[str, Any]:
        options = self.options
        url = f"http://127.0.0.1:{self.stack.agent_port}/"
        varied = (options.worlds, options.transports, self._players, url, options.on_stale)
        spec = job_spec(number, self.work, options.steps, options.seed, *varied)
        return spec if number < FIRST_HOSTILE else made_hostile(spec, number, self.work)

    async def _wait_for_first_steps(self, submitting: asyncio.Task[None]) -> None:
        deadline = time.monotonic() + self.options.settle_s
        while not any(job.step for job in self.watch.jobs.values()):
            self._check(submitting)
            if time.monotonic() > deadline:
                raise RunLate("no job took a step before the first fault")
            await asyncio.sleep(0.1)

    # Faults

    async def _strike_all(self, submitting: asyncio.Task[None]) -> None:
        began = self._began = time.monotonic()
        if self._is_hostile:
            self._later(keep_hostile(self.users, self.watch, lambda: self._is_calm, self.options.seed))
        for fault in self._plan():
            self._check(submitting)
            await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
            if fault.kind in self.users.kinds:  # who asks an API may have to wait
                self._later(self._strike(fault))
            else:
                await self._strike(fault)
                if self.options.is_patient:
                    await self._wait_for_recovery(fault.kind, submitting)
        await self._strike_once_more(submitting)
        for line in self.stack.all_lines:  # what has not happened by now would strike for as long as jobs run
            line.forget_orders()
        self.stack.streams.forget()
        self._is_calm = True

    async def _strike_once_more(self, submitting: asyncio.Task[None]) -> None:
        """What of the schedule has found nobody to strike."""
        rng, deadline = random.Random(self.options.seed), time.monotonic() + ONCE_MORE_S
        self.faults.are_orders_single = True
        while (missing := self._faults_missing()) and time.monotonic() < deadline:
            for kind in missing:
                self._check(submitting)
                await self._strike(Fault(-1, kind, 0.0, rng.getrandbits(48)))
            await asyncio.sleep(1.0)

    async def _wait_for_recovery(self, kind: str, submitting: asyncio.Task[None]) -> None:
        """Of a fault that waits for a stream, from when it has met one."""
        while self.stack.streams.is_awaited(kind):
            self._check(submitting)
            await asyncio.sleep(0.02)

        async def look() -> Mapping[Name, State]:
            self._check(submitting)
            async with impatient(self.stack.redis_url) as redis:
                return await episodes(redis, [job.id for job in self.watch.running()])

        async def serves() -> bool:
            line = self.stack.agent_line
            return line is None or await answers(line.port)

        began = time.monotonic()
        left = await recovered(look, serves)
        seconds = round(time.monotonic() - began, 3)
        self._note("recovered.jsonl", kind=kind, seconds=seconds, left=["/".join(name) for name in left])

    def _faults_missing(self) -> list[str]:
        return [kind for kind in self.coverage.never_ran() if kind in WEIGHTS]

    def _left_out(self) -> set[str]:
        chosen = set(self.options.kinds or WEIGHTS)
        transports = self.options.transports
        never_called = (OVER_GROUP if "group" not in transports else set()) | (
            FROM_DISK if "disk" not in transports else set()
        )
        return set(self._without()) | (set(WEIGHTS) - chosen) | never_called

    async def _strike(self, fault: Fault) -> None:
        at = time.monotonic()
        strike = self.users.kinds[fault.kind] if fault.kind in self.users.kinds else self.faults.kinds[fault.kind]
        outcome = await strike(random.Random(fault.seed))
        if not isinstance(outcome, Hit):
            self.misses[fault.kind] += 1
            self._note("faults.jsonl", number=fault.number, kind=fault.kind, missed=outcome)
            return
        self._note("faults.jsonl", number=fault.number, kind=fault.kind, **described(outcome))
        if not outcome.is_ordered:
            self.coverage.ran(fault.kind)
        if outcome.after is not None:
            self._later(outcome.after)
        took = time.monotonic() - at
        self.recoveries.struck(fault.kind)
        jobs = [job for job in outcome.jobs if not self.watch.jobs[job].is_over]
        if jobs:
            self.watch.expect_steps(jobs, lambda seconds: self.recoveries.recovered(fault.kind, seconds + took))

    def _happened(self, kind: str, *, is_certain: bool = True, **what: Any) -> None:
        """What was ordered, now; or what may be about to happen."""
        if is_certain:
            self.coverage.ran(kind)
        self._note("happened.jsonl", kind=kind, **what)

    def _later(self, what: Awaitable[None]) -> None:
        async def do() -> None:
            await what

        self._after.add(asyncio.create_task(do()))

    def _check(self, submitting: asyncio.Task[None]) -> None:
        for task in [one for one in (submitting, *self._after) if one.done()]:
            task.result()
            self._after.discard(task)

    # The end

    async def _settle(self, submitting: asyncio.Task[None]) -> None:
        reached, at = self._progress(), time.monotonic()
        while (open_jobs := self.watch.open()) or self._wants_jobs or self._is_submitting or self._after:
            self._check(submitting)
            await self.users.let_everybody_go()
            if reached != (now := self._progress()):
                reached, at = now, time.monotonic()
            if time.monotonic() > at + self.options.settle_s:
                still = ", ".join(f"{job.id} at step {job.step} ({job.status})" for job in open_jobs)
                raise RunLate(f"nothing strikes, and no step was taken in {self.options.settle_s:.0f} s: {still}")
            await asyncio.sleep(0.1)

    def _progress(self) -> tuple[int, int, int]:
        """What only grows, and not for ever."""
        return self.watch.num_steps, self._num_submitted, len(self.watch.jobs) - len(self.watch.open())

    def _note_kinds_of_jobs(self) -> None:
        for job, kinds in self._kinds.items():
            if self.watch.jobs[job].step:
                for kind in kinds:
                    self.coverage.ran(kind)

    async def _leave(self) -> None:
        self._note_kinds_of_jobs()
        for name in tried(Evidence(self.work)):
            self.coverage.ran(f"attack {name}")
        await self.stack.leave()
        await self.stack.close()
        left = await self._left_processes()
        end = {
            "ends": [asdict(end) for end in self.stack.nursery.ends],
            "absences": [asdict(absence) for absence in self.stack.absences.noted],
            "left_processes": left,
            "num_redis_starts": self.stack.num_redis_starts,
            "recoveries": self.recoveries.to_dict(),
            "misses": dict(self.misses),
            "seconds": time.monotonic() - self._began,
            "num_steps": self.watch.num_steps,
            "coverage": self.coverage.to_dict(),
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
                f"steps, {len(over)} jobs over, at step {now or '-'}, {self.stack.nursery.num_crashes} crashes",
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
