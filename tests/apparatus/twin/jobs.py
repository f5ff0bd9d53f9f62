"""Jobs and the leases on them, in memory: what ``services.state.job_table`` and its functions promise.

The rule kept here: the table of transitions is the one of ``services.state.jobs``; nothing else is shared with the
real one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from services.state.jobs import (
    HANDED_OVER,
    LOST,
    TRANSITIONS,
    CancelManner,
    Claim,
    DesiredState,
    IllegalTransition,
    InvalidCursor,
    JobAttempt,
    JobConflict,
    JobNotFound,
    JobRecord,
    JobStatus,
    StatusReason,
    default_reason,
    fits,
    new_job_id,
)
from services.state.keys import check_job_id
from services.state.leases import BeatWatch
from services.state.refusals import Conflict, Fenced
from tests.apparatus.twin.events import add_event
from tests.apparatus.twin.world import TwinJob, World

# In these an attempt says nothing about the job: its trainer was not meant to make a step.
_NOT_COUNTING = (JobStatus.PAUSED, JobStatus.CANCELLING)
ATTEMPTS_KEPT = 20


class TwinJobs:
    """The part of the store that is about jobs; ``Store`` says what each method means."""

    def __init__(
        self,
        world: World,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        max_attempts: int = 3,
    ) -> None:
        self._world = world
        self._watch = BeatWatch(lease_s, clock)
        self._now = now
        self._max_attempts = max_attempts

    async def load_functions(self) -> None:
        """There is nothing to load."""

    async def rebuild(self) -> int:
        """Nothing is ever lost but with the process."""
        return 0

    async def create_job(
        self, spec: BaseModel | str, *, idempotency_key: str | None = None, job_id: str | None = None, owner: str = ""
    ) -> JobRecord:
        data: Any = json.loads(spec) if isinstance(spec, str) else spec.model_dump(mode="json")
        if not isinstance(data, dict):
            raise TypeError("a job's specification is a JSON object")
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        name = job_id or new_job_id(self._now())
        check_job_id(name)
        if idempotency_key is not None:
            name = self._world.idempotency.setdefault(_digest(idempotency_key), name)
        known = self._world.jobs.get(name)
        if known is not None and known.spec != text:
            raise JobConflict(name)
        if known is None:
            job = self._world.jobs[name] = TwinJob(text, self._time(), owner=owner)
            self._explain(job, default_reason(JobStatus.QUEUED))
            await self._tell(job, None)
        return await self.get_job(name)

    async def job_under(self, idempotency_key: str) -> str | None:
        return self._world.idempotency.get(_digest(idempotency_key))

    async def get_job(self, job: str) -> JobRecord:
        found = self._find(job)
        record = JobRecord(
            id=job,
            spec=found.spec,
            status=found.status,
            desired_state=found.desired_state,
            status_reason=found.reason,
            attempt=found.attempt,
            epoch=found.epoch,
            step=found.step,
            policy_version=found.policy_version,
            created_at=found.created_at,
            started_at=found.started_at,
            finished_at=found.finished_at,
            settings_version=found.settings_version,
            settings=json.loads(found.settings),
            cancel_manner=found.cancel_manner,
            attempts=tuple(found.attempts),
        )
        return replace(record, owner=found.owner) if found.owner else record

    async def list_jobs(
        self, limit: int = 20, after: str | None = None, *, before: str | None = None, order: str = "asc"
    ) -> list[JobRecord]:
        if order not in ("asc", "desc"):
            raise ValueError(f"order is asc or desc, not {order!r}")
        for cursor in (after, before):
            if cursor is not None and cursor not in self._world.jobs:
                raise InvalidCursor(f"there is no job {cursor!r} to continue from")
        names = sorted(self._world.jobs, reverse=order == "desc")
        if after is not None:
            names = names[names.index(after) + 1 :]
        if before is not None and before in names:
            names = names[: names.index(before)]
        return [await self.get_job(name) for name in names[:limit]]

    async def running_jobs(self) -> list[str]:
        return sorted(name for name, job in self._world.jobs.items() if job.status.is_served)

    async def set_status(
        self, job: str, status: JobStatus | str, *, token: str | None = None, reason: StatusReason | None = None
    ) -> JobRecord:
        found, target = self._find(job), JobStatus(status)
        if token and not self._world.owns(job, token):
            raise Fenced(f"status {target}")
        if found.status is target:
            said = (found.reason.code, found.reason.message) if found.reason else None
            if reason is not None and reason.code and (reason.code, reason.message) != said:
                self._explain(found, reason)
                await self._tell(found, target)
            return await self.get_job(job)
        if target not in TRANSITIONS[found.status]:
            raise IllegalTransition(job, found.status, target)
        why = reason if reason is not None and reason.code else default_reason(target)
        if target.is_terminal:
            self._finish(job, found)
            self._end_attempt(found, StatusReason(why.code or str(target), why.message))
            if not token:
                found.trainer = ""
        await self._enter(found, target, why)
        return await self.get_job(job)

    async def set_desired_state(
        self, job: str, desired: DesiredState | str, manner: CancelManner = CancelManner.NOW
    ) -> JobRecord:
        found, wanted = self._find(job), DesiredState(desired)
        is_over, cancels = found.status.is_terminal, wanted is DesiredState.CANCELLED
        is_new_manner = cancels and found.cancel_manner is not manner
        if found.desired_state is wanted and (cancels if is_over else not is_new_manner):
            return await self.get_job(job)
        if is_over or (found.desired_state is DesiredState.CANCELLED and not cancels):
            raise IllegalTransition(job, found.status, wanted)
        found.desired_state = wanted
        if cancels:
            found.cancel_manner = manner
        if wanted is DesiredState.CANCELLED and found.status is JobStatus.QUEUED:
            self._finish(job, found)
            await self._enter(found, JobStatus.CANCELLED, default_reason(JobStatus.CANCELLED))
        else:
            await self._tell(found, found.status)
        return await self.get_job(job)

    async def change_settings(
        self, job: str, seen_version: int, values: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> JobRecord:
        found, text = self._find(job), json.dumps(dict(values), sort_keys=True, allow_nan=False)
        if (found.settings_version, found.settings) == (seen_version + 1, text):
            return await self.get_job(job)
        if found.status.is_terminal:
            raise IllegalTransition(job, found.status, "changed")
        if found.settings_version != seen_version:
            raise Conflict(f"settings of version {found.settings_version}")
        found.settings_version, found.settings = seen_version + 1, text
        told = {"version": found.settings_version, "changes": dict(changes)}
        await add_event(self._world, found, "settings.changed", told, self._now())
        return await self.get_job(job)

    async def update_progress(self, job: str, token: str, step: int, version: int) -> None:
        found = self._owned(job, token, f"progress to step {step}")
        if step > found.furthest_step:
            found.furthest_step, found.barren_attempts = step, 0
        found.step, found.policy_version = step, version

    # The trainer's lease

    async def claim_job(
        self, trainer: str, *, unfit: Callable[[str], str | None] = fits, lost_first: bool = False
    ) -> Claim | None:
        for name in self._to_be_had(lost_first):
            job = self._world.jobs[name]
            is_idle = job.desired_state is DesiredState.PAUSED and job.status in (JobStatus.QUEUED, JobStatus.PAUSED)
            if is_idle:
                continue
            if job.desired_state is not DesiredState.CANCELLED and (problem := unfit(job.spec)) is not None:
                if job.status is JobStatus.QUEUED:
                    await self.set_status(name, JobStatus.QUEUED, reason=StatusReason("capacity", problem))
                continue
            if await self._is_given_up(name, job):
                continue
            job.trainer, job.beat = uuid4().hex, 0
            job.epoch, job.attempt = job.epoch + 1, job.attempt + 1
            self._end_attempt(job, LOST)
            job.attempts = [*job.attempts, JobAttempt(job.attempt, job.epoch, trainer, self._time())][-ATTEMPTS_KEPT:]
            job.barren_attempts += job.status not in _NOT_COUNTING
            self._watch.forget(name)
            if JobStatus.STARTING in TRANSITIONS[job.status]:
                await self._enter(job, JobStatus.STARTING, default_reason(JobStatus.STARTING))
            else:
                await self._tell(job, job.status)
            return Claim(name, job.trainer, epoch=job.epoch, attempt=job.attempt)
        return None

    def _to_be_had(self, lost_first: bool) -> list[str]:
        jobs = {name: job for name, job in sorted(self._world.jobs.items()) if job.finished_at is None}
        free = {name: self._is_free(name, job) for name, job in jobs.items()}
        names = [name for name in jobs if free[name]]
        if not lost_first:
            return names
        waiting = [name for name in names if jobs[name].status is JobStatus.QUEUED and not jobs[name].trainer]
        lost = [name for name in names if name not in waiting]
        return lost if any(self._watch.is_undecided(name) for name in jobs if not free[name]) else lost + waiting

    async def give_up_lost_jobs(self, own: str) -> list[str]:
        given_up = []
        for name, job in sorted(self._world.jobs.items()):
            if name != own and job.finished_at is None and job.trainer and self._is_free(name, job):
                if job.status in _NOT_COUNTING:
                    job.trainer = ""
                    self._end_attempt(job, LOST)
                else:
                    await self._disown(job, LOST)
                given_up.append(name)
        return given_up

    def _is_free(self, name: str, job: TwinJob) -> bool:
        return not job.trainer or self._watch.stands_still(name, (job.trainer, job.beat))

    async def _is_given_up(self, name: str, job: TwinJob) -> bool:
        if job.status in _NOT_COUNTING or job.barren_attempts < self._max_attempts:
            return False
        self._finish(name, job)
        self._end_attempt(job, LOST)
        job.trainer = ""
        message = f"{self._max_attempts} trainers in a row were lost before they made a new step"
        await self._enter(job, JobStatus.FAILED, StatusReason("max_attempts_exceeded", message))
        return True

    async def beat_trainer(self, job: str, token: str) -> None:
        self._owned(job, token, "beat of the trainer").beat += 1

    async def release_job(self, job: str, token: str, cause: StatusReason = HANDED_OVER) -> None:
        found = self._world.jobs.get(job)
        if found is None or not found.trainer:
            return
        self._owned(job, token, "release of the job")
        found.trainer, found.barren_attempts = "", 0
        self._end_attempt(found, cause)
        if JobStatus.QUEUED in TRANSITIONS[found.status]:
            await self._enter(found, JobStatus.QUEUED, default_reason(JobStatus.QUEUED))

    async def end_attempt(self, job: str, token: str, cause: StatusReason) -> None:
        found = self._world.jobs.get(job)
        if found is None or not found.trainer:
            return
        self._owned(job, token, "end of the attempt")
        await self._disown(found, cause)

    async def _disown(self, job: TwinJob, cause: StatusReason) -> None:
        job.trainer = ""
        self._end_attempt(job, cause)
        self._explain(job, cause)
        await self._tell(job, job.status)

    def _end_attempt(self, job: TwinJob, cause: StatusReason) -> None:
        if job.attempts and job.attempts[-1].ended_at is None:
            job.attempts[-1] = replace(
                job.attempts[-1], ended_at=self._time(), code=cause.code, message=cause.message, step=job.step
            )

    async def raise_epoch(self, job: str, token: str, epoch: int) -> int:
        found = self._owned(job, token, f"epoch {epoch}")
        found.epoch = max(found.epoch, epoch)
        return found.epoch

    def _find(self, job: str) -> TwinJob:
        if job not in self._world.jobs:
            raise JobNotFound(job)
        return self._world.jobs[job]

    def _owned(self, job: str, token: str, what: str) -> TwinJob:
        if not self._world.owns(job, token):
            raise Fenced(what)
        return self._world.jobs[job]

    def _finish(self, name: str, job: TwinJob) -> None:
        job.finished_at = self._time()
        queue = self._world.queue(name)
        if queue.groups:
            queue.counters["dropped_job_over"] += len(queue.groups)
        queue.groups.clear()

    async def _enter(self, job: TwinJob, status: JobStatus, reason: StatusReason) -> None:
        before, job.status = job.status, status
        if status is JobStatus.RUNNING and job.started_at is None:
            job.started_at = self._time()
        self._explain(job, reason)
        await self._tell(job, before)

    def _explain(self, job: TwinJob, reason: StatusReason) -> None:
        if not reason.code:
            job.reason = None
            return
        is_same = job.reason is not None and job.reason.code == reason.code
        since = job.reason.since if job.reason is not None and is_same else self._time()
        job.reason = StatusReason(reason.code, reason.message, since)

    async def _tell(self, job: TwinJob, previous: JobStatus | None) -> None:
        reason = job.reason
        data = {
            "status": str(job.status),
            "previous": None if previous is None else str(previous),
            "desired_state": str(job.desired_state),
            "attempt": job.attempt,
            "status_reason": reason and {"code": reason.code, "message": reason.message, "since": reason.since},
        }
        await add_event(self._world, job, "job.status", data, self._now())

    def _time(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _digest(idempotency_key: str) -> str:
    return hashlib.sha256(idempotency_key.encode()).hexdigest()
