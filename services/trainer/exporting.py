"""Exports that an API without torch has left to trainers, as in containers: writes them, one at a time, beside whatever
else the trainer does.

Rule: it ends no attempt and keeps none waiting. It runs in threads of its own, since an attempt may wait for all others
of the process, and what computes is a process that dies with this one. A request of which this trainer lacks the model
is left to another trainer, with the reason. One that is cut short because the trainer stops stays for the next trainer;
one that fails, or over which a trainer died, is answered with the reason, and removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gspo_core.model_files import problem_of
from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.durable import remove_directory
from services.files.export import ExportFailed, ExportStopped, export_checkpoint
from services.files.export_claim import BEAT_S, DIED, PATIENCE_S, ExportClaim, ExportRequest, requested_in
from services.files.job_dir import JobDir, JobsDir
from services.files.job_records import DamagedRecord, JobRecords
from services.process.telemetry import get_logger

LOOK_S = 3.0
# A look at very many jobs on a slow disk takes at most this share of the time.
LOOKING_SHARE = 0.02
# While it writes one.
LOOK_BESIDE_S = PATIENCE_S / 4


class ExportErrands:
    def __init__(self, jobs: JobsDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._jobs = jobs
        self._clock = clock
        self._is_over = threading.Event()
        self._next_beat = 0.0
        self._next_look = 0.0
        self._found: list[tuple[JobDir, Position]] = []
        """At the last look: what this trainer writes now, and what waits behind it."""
        self._claim: ExportClaim | None = None
        """That of what it writes now."""

    async def run(self) -> None:
        """Until cancelled; what is being written then is given up within a second."""
        threads = ThreadPoolExecutor(1, "exports")
        try:
            while True:
                took_s = await asyncio.get_running_loop().run_in_executor(threads, self._safely_look)
                await asyncio.sleep(max(LOOK_S, took_s / LOOKING_SHARE))
        finally:
            self._is_over.set()
            threads.shutdown(wait=False)
            if (claim := self._claim) is not None:  # the process may end before the thread has given it up
                with contextlib.suppress(OSError):
                    claim.leave()

    def look(self) -> float:
        """Write all that is asked for and can be written here. Blocking. Returns how long the looking alone took."""
        began = self._clock()
        self._found = self._of_this_trainer()
        took_s = self._clock() - began
        for job, at in list(self._found):
            if not self._is_over.is_set():
                self._answer(job, at)
        return took_s

    def _safely_look(self) -> float:
        try:
            return self.look()
        except Exception as error:  # trouble with files of one job is none of the next look
            get_logger().warning("could not see to exports", error=f"{type(error).__name__}: {error}")
            return 0.0

    def _of_this_trainer(self) -> list[tuple[JobDir, Position]]:
        found = []
        for job, at in requested_in(self._jobs):
            request = ExportRequest(job.export(at))
            if not request.is_open:
                continue
            problem = _problem_here(job)
            if problem is None:
                found.append((job, at))
            else:
                request.decline(problem)
        return found

    def _answer(self, job: JobDir, at: Position) -> None:
        target = job.export(at)
        request, claim = ExportRequest(target), ExportClaim(target)
        try:
            if target.is_dir():
                request.withdraw()
            elif not request.exists:
                return
            elif claim.is_abandoned:
                _end(request, claim, DIED)
            elif claim.take(lambda: request.is_open):
                self._write(job, at, request, claim)
        except OSError as error:
            request.decline(str(error))
            get_logger().warning("could not export", job=job.id, step=at.step, error=str(error))

    def _write(self, job: JobDir, at: Position, request: ExportRequest, claim: ExportClaim) -> None:
        log = get_logger().bind(job=job.id, epoch=at.epoch, step=at.step)
        log.info("exporting a checkpoint")
        failure: str | None = None
        self._next_beat = self._clock() + BEAT_S
        self._next_look = self._clock() + LOOK_BESIDE_S
        self._claim = claim

        def goes_on() -> bool:
            self._beat(claim)
            return request.exists and not self._is_over.is_set()

        try:
            export_checkpoint(job, at.epoch, at.step, job.export(at), goes_on)
            _remove_unless_wanted(job, at, request)
        except ExportStopped:
            claim.leave()
            log.info("the export was stopped; a request that is still there is for the next trainer")
            return
        except (ExportFailed, OSError) as error:
            failure = str(error)
        finally:
            self._claim = None
        _end(request, claim, failure)
        log.info("exported" if failure is None else "the export failed", why=failure)

    def _beat(self, claim: ExportClaim) -> None:
        """Also for all that waits behind this one."""
        if self._clock() < self._next_beat:
            return
        self._next_beat = self._clock() + BEAT_S
        claim.beat()
        if self._clock() >= self._next_look:  # others may have been asked for meanwhile
            self._next_look = self._clock() + LOOK_BESIDE_S
            with contextlib.suppress(OSError):
                self._found = self._of_this_trainer()
        for job, at in self._found:
            ExportRequest(job.export(at)).renew()


def _end(request: ExportRequest, claim: ExportClaim, failure: str | None) -> None:
    """In this order: who dies between two of these leaves a request that the next one answers, or the answer. A full
    disk may keep the reason, and not the request, which would be tried without end."""
    try:
        if failure is not None:
            claim.tell(failure)
    finally:
        request.withdraw()
        claim.leave()
        claim.bury()


def _remove_unless_wanted(job: JobDir, at: Position, request: ExportRequest) -> None:
    """The checkpoint may have been removed with its export while that was written."""
    if not request.exists and not CheckpointStore(job).has(at):
        remove_directory(job.export(at))


def _problem_here(job: JobDir) -> str | None:
    """Why this trainer cannot export checkpoints of a job, where another one may."""
    try:
        return problem_of(Path(JobRecords(job).accepted().job_spec.model))
    except (OSError, ValueError, DamagedRecord) as error:
        return f"its specification cannot be read: {error}"
