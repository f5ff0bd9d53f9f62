"""Jobs that no trainer has: who else is there says so, and gives up the trainer that has gone.

One rule: a trainer is gone, and a job is without one, by what this process has seen on its own clock; the server lets
it say so only while no trainer has the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.api.http.presence import LOOKS_PER_LEASE, Presence
from services.process.telemetry import get_logger
from services.state.client import Away
from services.state.jobs import (
    LOST,
    CancelManner,
    DesiredState,
    JobRecord,
    JobStatus,
    StatusReason,
    WaitCode,
    default_reason,
)
from services.state.store import Store

NO_TRAINER: WaitCode = "no_trainer"


class Unattended:
    def __init__(self, store: Store, presence: Presence, lease_s: float, clock: Callable[[], float]) -> None:
        self._store, self._presence = store, presence
        self._lease_s, self._clock = lease_s, clock
        self._since: dict[str, float] = {}
        """When each job without a trainer was first seen so."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.look()
            except Away:
                pass
            except Exception:  # a full disk, or a defect: jobs of the next look are to be told of all the same
                get_logger().exception("jobs without a trainer could not be looked at")
            await asyncio.sleep(self._lease_s / LOOKS_PER_LEASE)

    async def look(self) -> None:
        """One round, at least twice per lease."""
        await self._store.jobs.give_up_lost()
        num_trainers = sum(one.role == "trainer" and one.is_alive for one in await self._presence.members())
        waiting = [job for job in await self._store.jobs.unowned() if not _rests(job)]
        now = self._clock()
        self._since = {job.id: self._since.get(job.id, now) for job in waiting}
        for job in waiting:
            # Between two attempts a job has none for a moment.
            if now - self._since[job.id] >= self._lease_s / 2:
                await self._tell(job, num_trainers)

    async def _tell(self, job: JobRecord, num_trainers: int) -> None:
        if job.desired_state is DesiredState.CANCELLED and job.cancel_manner is CancelManner.NOW:
            await self._store.jobs.set_desired_state(job.id, DesiredState.CANCELLED, CancelManner.NOW)
        elif (reason := reason_of(job, num_trainers)) is not None and not _says(job, reason):
            await self._store.jobs.explain_unowned(job.id, reason)


def _says(job: JobRecord, reason: StatusReason) -> bool:
    held = job.status_reason
    return held is not None and (held.code, held.message) == (reason.code, reason.message)


def _rests(job: JobRecord) -> bool:
    """It needs no trainer until its user wants something else."""
    return job.desired_state is DesiredState.PAUSED and job.status in (JobStatus.QUEUED, JobStatus.PAUSED)


def reason_of(job: JobRecord, num_trainers: int) -> StatusReason | None:
    """What a job says that waits for a trainer, where so many are alive; None where it says it already."""
    is_ours = job.status_reason is not None and job.status_reason.code == NO_TRAINER
    if job.status is JobStatus.QUEUED and num_trainers:
        return default_reason(JobStatus.QUEUED) if is_ours else None
    if not num_trainers:
        goes_on = f"it goes on from step {job.step}" if job.step else "it begins"
        return StatusReason(NO_TRAINER, f"no trainer is there{_last_one(job)}: start one, and {goes_on}")
    there = "1 is there and has" if num_trainers == 1 else f"{num_trainers} are there and have"
    return StatusReason(
        NO_TRAINER, f"no trainer has this job{_last_one(job)}; {there} not taken it yet: each trains one job at a time"
    )


def _last_one(job: JobRecord) -> str:
    if not job.attempts:
        return ""
    last = job.attempts[-1]
    how = "was lost" if last.code == LOST.code else f"left it ({last.code})"
    return f" since {_time_of_day(last.ended_at)}, when {last.trainer} {how}" if last.ended_at else ""


def _time_of_day(timestamp: str) -> str:
    return f"{timestamp[11:19]} UTC"
