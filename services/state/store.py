"""The control plane's state, one door to it: jobs, trainer leases, events, versions, engines, workers, metrics.

Duty: the interface that processes use; the work is done by one small module per subject. The rule: whatever a client
sends again changes nothing, and what an owner writes is fenced by its token. It keeps no state of its own and knows
nothing of what a specification says.

With ``jobs_dir`` the jobs' directories are the truth and Redis may be lost: what is acknowledged is written down there
first, and a server that was wiped is given it back by whoever notices (``rebuild``).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from gspo_core.types import WeightsManifest
from services.files.disk_space import write_when_there_is_room
from services.files.job_dir import JobsDir
from services.files.job_records import JobRecords
from services.state.client import RedisClient
from services.state.events import EventLog, JobEvent
from services.state.fleet import Everyone, Fleet
from services.state.fleet_records import EngineRecord, EngineReport, TrainerRecord, WorkerRecord
from services.state.functions import Functions
from services.state.job_table import JobTable
from services.state.jobs import (
    HANDED_OVER,
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
    fits,
)
from services.state.keys import job_key, job_keys
from services.state.leases import BeatWatch
from services.state.metrics import MetricSeries
from services.state.rebuild import Rebuild, encode_description
from services.state.refusals import Conflict, Fenced, Missing
from services.state.versions import Version, VersionTable

__all__ = [
    "CancelManner",
    "Claim",
    "Conflict",
    "DesiredState",
    "Fenced",
    "IllegalTransition",
    "InvalidCursor",
    "JobAttempt",
    "JobConflict",
    "JobEvent",
    "JobNotFound",
    "JobRecord",
    "JobStatus",
    "StatusReason",
    "Store",
    "Version",
]


class Store:
    """``lease_s``: a trainer whose beat stands still for so long loses its job. ``now`` is shown to people only.

    ``max_attempts``: so many trainers in a row may be lost without a new step, then the job has failed.
    ``waits_for_room``: what is to be written down where the disk is full is waited for, instead of raising.
    """

    def __init__(
        self,
        redis: RedisClient,
        *,
        lease_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        max_attempts: int = 3,
        jobs_dir: JobsDir | None = None,
        waits_for_room: bool = False,
    ) -> None:
        self._functions = Functions(redis)
        self._jobs_dir = jobs_dir
        self._to_disk = write_when_there_is_room if waits_for_room else asyncio.to_thread
        self._rebuild = None if jobs_dir is None else Rebuild(self._functions, jobs_dir)
        self._jobs = JobTable(
            self._functions,
            BeatWatch(lease_s, clock),
            now,
            max_attempts=max_attempts,
            jobs_dir=jobs_dir,
            rebuild=self._rebuild,
            waits_for_room=waits_for_room,
        )
        self._events = EventLog(self._functions)
        self._versions = VersionTable(self._functions, jobs_dir)
        self._fleet = Fleet(self._functions)
        self._metrics = MetricSeries(self._functions)

    async def load_functions(self) -> None:
        """Make sure that the server has our functions; raises LibraryTooOld, LibraryTooNew."""
        await self._functions.load()

    async def rebuild(self) -> int:
        """Give the server what it does not know, or knows an older state of; returns how many jobs that were.

        Processes with ``jobs_dir`` call it when they start. Later a wiped server is noticed by listing, claiming,
        creating and not finding jobs.
        """
        return 0 if self._rebuild is None else await self._rebuild.run()

    # Jobs

    async def create_job(
        self, spec: BaseModel | str, *, idempotency_key: str | None = None, job_id: str | None = None, owner: str = ""
    ) -> JobRecord:
        """Accept a job. The same key (or the same ``job_id``) with the same body is the same job; JobConflict else.

        Put what tells credentials apart into the key.
        """
        return await self._jobs.create(spec, idempotency_key, job_id, owner)

    async def job_under(self, idempotency_key: str) -> str | None:
        """The id that was given out under this key; a job need not have come of it."""
        return await self._jobs.under(idempotency_key)

    async def get_job(self, job: str) -> JobRecord:
        """Raises JobNotFound."""
        return await self._jobs.get(job)

    async def list_jobs(
        self, limit: int = 20, after: str | None = None, *, before: str | None = None, order: str = "asc"
    ) -> list[JobRecord]:
        """Jobs by id, which is by time of creation; ``after`` and ``before`` are exclusive. Raises InvalidCursor."""
        return await self._jobs.page(limit, after, before, order)

    async def running_jobs(self) -> list[str]:
        """Jobs that rollout workers serve, the oldest first."""
        return await self._jobs.served()

    async def set_status(
        self, job: str, status: JobStatus | str, *, token: str | None = None, reason: StatusReason | None = None
    ) -> JobRecord:
        """Move a job; in the state that it is in already, only the reason may change.

        With a ``token`` only the owner may. Without a reason the state's usual one is given. The event ``job.status``
        is written by the same atomic call. Raises JobNotFound, IllegalTransition, Fenced.
        """
        return await self._jobs.set_status(job, JobStatus(status), token, reason)

    async def set_desired_state(
        self, job: str, desired: DesiredState | str, manner: CancelManner = CancelManner.NOW
    ) -> JobRecord:
        """Say what the user wants; the owner brings it about. A queued job is cancelled at once.

        What holds already is no error; a cancelled wish cannot be taken back, only its ``manner`` can change, and a job
        that is over has no other wish (IllegalTransition). Raises JobNotFound.
        """
        return await self._jobs.set_desired_state(job, DesiredState(desired), manner)

    async def change_settings(
        self, job: str, seen_version: int, values: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> JobRecord:
        """Say what holds of a job in place of its specification: all of it, and what of it is new, for the event.

        Raises JobNotFound, IllegalTransition (the job is over) and Conflict, if ``seen_version`` is not the newest.
        """
        return await self._jobs.change_settings(job, seen_version, values, changes)

    async def update_progress(self, job: str, token: str, step: int, version: int) -> None:
        """Raises Fenced."""
        await self._jobs.update_progress(job, token, step, version)

    # The trainer's lease on a job

    async def claim_job(
        self, trainer: str, *, unfit: Callable[[str], str | None] = fits, lost_first: bool = False
    ) -> Claim | None:
        """A job that waits, or whose trainer's beat stood still for a whole lease; None when there is none.

        ``unfit`` says of a specification why this trainer cannot train it: it is left to others, and told so while it
        is queued. Say the same on all trainers. Whoever comes may end what its user has cancelled.

        ``lost_first``: jobs of dead trainers come first, and one that waits is left waiting while it is not known yet
        whether another's trainer is dead. A trainer that starts again goes on with what it had.

        Idle trainers call this at least twice per lease: a beat must be watched before it counts as standing still.
        A taken-over job has one attempt and one epoch more, and starts again, unless it is paused or cancelling.
        """
        return await self._jobs.claim(trainer, unfit, lost_first)

    async def give_up_lost_jobs(self, own: str) -> list[str]:
        """Jobs other than ``own`` whose trainer's beat stood still for a whole lease have none from now on: they wait
        for one, and hold no engine. Busy trainers call this at least twice per lease; idle ones claim such jobs."""
        return await self._jobs.give_up_lost(own)

    async def beat_trainer(self, job: str, token: str) -> None:
        """Renew the lease, at least every fifth of its length. Raises Fenced."""
        await self._jobs.beat(job, token)

    async def release_job(self, job: str, token: str, cause: StatusReason = HANDED_OVER) -> None:
        """Give the job up in an orderly way: another trainer may claim it at once, and the attempt does not count.
        ``cause`` is listed with it. Raises Fenced."""
        await self._jobs.release(job, token, cause)

    async def end_attempt(self, job: str, token: str, cause: StatusReason) -> None:
        """Give the job up because this attempt failed: it counts, and its cause is listed. Raises Fenced."""
        await self._jobs.end_attempt(job, token, cause)

    async def raise_epoch(self, job: str, token: str, epoch: int) -> int:
        """Never lower than ``epoch`` (the highest on disk plus one) from now on; returns the epoch that holds."""
        return await self._jobs.raise_epoch(job, token, epoch)

    # Events

    async def add_event(self, job: str, type: str, data: Mapping[str, Any], *, token: str | None = None) -> str:
        """Returns the event's id. Events of type ``job.status`` are written by the store itself.

        With a ``token`` only the owner may (Fenced): what it says of its run must not come from a former one.
        Raises JobNotFound.
        """
        return await self._events.add(job, type, data, token)

    async def read_events(self, job: str, after: str = "0", *, count: int = 100, block_ms: int = 0) -> list[JobEvent]:
        """Up to ``count`` events after the id ``after``, waiting at most ``block_ms`` for the first (0: not at all).

        If some of them were trimmed, the first is of type ``gap``. Raises InvalidCursor.
        """
        return await self._events.read(job, after, count, block_ms)

    async def newest_event(self, job: str) -> str | None:
        """The id of the newest event that is kept."""
        return await self._events.newest(job)

    async def trim_events(self, job: str, keep: int) -> None:
        """Remove all but the newest ``keep`` events now; the store does so by itself beyond ten thousand."""
        await self._events.trim(job, keep)

    # Environments: described by workers, since no environment code runs in the trainer

    async def describe_environment(self, job: str, index: int, description: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the description that holds: the first one, since tasks are drawn from its numbers.

        Raises JobNotFound.
        """
        text = encode_description(dict(description))
        try:
            held = await self._functions.call("describe_environment", job_keys(job), index, text)
        except Missing:
            raise JobNotFound(job) from None
        return self._description(held)

    async def environment_description(self, job: str, index: int) -> dict[str, Any] | None:
        """Where this process has the job's directory, what it is told is there too when this returns."""
        held = await self._functions.redis.hget(job_key(job, "environments"), str(index))
        if held is None:
            return None
        description = self._description(held)
        if self._jobs_dir is not None:
            await self._to_disk(JobRecords(self._jobs_dir.job(job)).write_environment, index, description)
        return description

    def _description(self, text: bytes) -> dict[str, Any]:
        description: dict[str, Any] = json.loads(text)
        return description

    # Versions

    async def next_version(self, job: str, token: str, *, at_least: int = 0) -> int:
        """A publish number that was never handed out, from 0, not below ``at_least``. Raises Fenced."""
        return await self._versions.next(job, token, at_least)

    async def publish_version(self, job: str, token: str, manifest: WeightsManifest) -> None:
        """Make ``manifest`` the current version. Raises Fenced; Conflict for a number below the current one, or one
        that names other weights."""
        await self._versions.publish(job, token, manifest)

    async def current_version(self, job: str) -> WeightsManifest | None:
        return await self._versions.current(job)

    async def versions(self, job: str) -> list[WeightsManifest]:
        """All that were published, in order."""
        return await self._versions.all(job)

    async def version_table(self, job: str) -> list[Version]:
        """Epoch, step and parent of all that were published, in order."""
        return await self._versions.table(job)

    # Engines, trainers and workers. The dead are forgotten after a while.

    async def register_engine(self, record: EngineRecord) -> None:
        """Repeat it: every call raises the engine's ``beats``."""
        await self._fleet.enlist("engine", record)

    async def remove_engine(self, engine_id: str) -> None:
        await self._fleet.delist("engine", engine_id)

    async def engines(self) -> list[EngineRecord]:
        """All that have registered, by id."""
        return await self._fleet.engines()

    async def drain_engine(self, engine_id: str, wanted: bool = True) -> None:
        """It gets no new requests and no new weights; the job that holds it gives it back when it is idle, and no job
        takes it until this is taken back."""
        await self._fleet.drain_engine(engine_id, wanted)

    async def bind_engine(self, job: str, token: str, engine_id: str) -> bool:
        """Bind an engine to the job. False: it serves another job. Raises Fenced, Missing (no such engine)."""
        return await self._fleet.bind(job, token, engine_id)

    async def mark_engine(self, job: str, token: str, engine_id: str, report: EngineReport) -> bool:
        """What the job's owner says of an engine that it holds; False: it does not hold it."""
        return await self._fleet.mark(job, token, engine_id, report)

    async def unbind_engine(self, job: str, token: str, engine_id: str) -> None:
        """Give an engine back; one that this owner does not hold is left alone."""
        await self._fleet.unbind(job, token, engine_id)

    async def register_trainer(self, record: TrainerRecord) -> None:
        """Repeat it: every call raises the trainer's ``beats``."""
        await self._fleet.enlist("trainer", record)

    async def remove_trainer(self, trainer: str) -> None:
        await self._fleet.delist("trainer", trainer)

    async def processes(self) -> Everyone:
        """Trainers, workers and engines, in one look."""
        return await self._fleet.everyone()

    async def trainers(self) -> list[TrainerRecord]:
        """All that have registered, by id."""
        return await self._fleet.trainers()

    async def register_worker(self, record: WorkerRecord) -> None:
        """Repeat it: every call raises the worker's ``beats``."""
        await self._fleet.enlist("worker", record)

    async def remove_worker(self, worker: str) -> None:
        await self._fleet.delist("worker", worker)

    async def workers(self) -> list[WorkerRecord]:
        """All that have registered, by id."""
        return await self._fleet.workers()

    # Metrics

    async def add_metrics(self, job: str, step: int, metrics: Mapping[str, float], *, token: str | None = None) -> None:
        """Add values to a step; a name that it has already gets the new value. All numbers are finite.

        With a ``token`` only the owner may (Fenced). Raises JobNotFound.
        """
        await self._metrics.add(job, step, metrics, token)

    async def read_metrics(self, job: str, from_step: int = 0) -> list[dict[str, Any]]:
        """One dict per step in order: ``{"step": n, name: value, ...}``."""
        return await self._metrics.read(job, from_step)
