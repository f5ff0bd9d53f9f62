"""Claims jobs one at a time, starts an attempt at each, and reports the outcome to Redis.

Rule: a claimed job reaches a terminal state, or its claim lapses and another trainer continues it. A temporary outage
(Redis away, disk full) never fails a job or counts as a failed attempt, and no job ends this process. The worker holds
the lease but no model, and does not decide where an attempt runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec
from pydantic import ValidationError

from gspo_core.spec import JobSpec
from services.files.disk_space import NoRoom, raising_no_room
from services.process.cancelling import cancel_all, first_to_end, sleep_unless
from services.process.telemetry import get_logger
from services.state.client import Away
from services.state.fleet_records import TrainerRecord
from services.state.jobs import fits
from services.state.queue import Bus, Fenced
from services.state.store import Claim, JobNotFound, StatusReason, Store
from services.trainer.giving_way import GivingWay, Standstill
from services.trainer.queued_models import QueuedModels
from services.trainer.telling.attempt_messages import AttemptEnd
from services.trainer.telling.failure import AWAY, CANCELLED, NO_ROOM, QUEUE_DAMAGED, RanksLost

IDLE_POLL_S = 0.3
BEAT_S = 2.0
QUEUED_LOOK_S = 5.0
# Beat at least five times per lease, so that four heartbeats may be lost.
BEATS_PER_LEASE = 5


class Attempts(Protocol):
    """Runs attempts, one at a time. Once ``run`` returns or raises, the attempt leaves no work running."""

    def is_ready(self) -> bool:
        """Whether an attempt can begin now. Raises errors that must end this process."""

    async def run(self, claim: Claim, spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        """``stop`` ends the attempt immediately; ``leaving`` ends it at a step boundary, after saving."""


class TrainerWorker:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        name: str,
        attempts: Attempts,
        *,
        lease_s: float = 30.0,
        capabilities: Mapping[str, str | int] = MappingProxyType({}),
        unfit: Callable[[str], str | None] = fits,
        yield_after_s: float | None = None,
    ) -> None:
        """``unfit`` returns why this trainer cannot run a specification, or None. ``yield_after_s``: after so long
        without progress a job gives way to one that waits; None: never."""
        self._store = store
        self._bus = bus
        self._name = name
        self._attempts = attempts
        self._capabilities = capabilities
        self._unfit = unfit
        self._left: dict[str, tuple[Claim, StatusReason]] = {}
        """Jobs still to be released, with the reason."""
        self._queued = QueuedModels(store, name, unfit)
        self._giving_way = None if yield_after_s is None else GivingWay(store, bus, unfit, yield_after_s)
        self.beat_s = min(BEAT_S, lease_s / BEATS_PER_LEASE)

    async def run(self, stop: asyncio.Event, leaving: asyncio.Event | None = None) -> None:
        """Run until ``stop``, which ends an attempt immediately, or ``leaving``, which saves at a step boundary."""
        leaving = leaving or asyncio.Event()
        announcing = asyncio.create_task(self._announce(), name="announce")
        try:
            while not (stop.is_set() or leaving.is_set()):
                claim = await self._claim() if self._attempts.is_ready() else None
                if claim is None:
                    await sleep_unless(stop, IDLE_POLL_S)
                    continue
                await self._serve(claim, stop, leaving)
                self._attempts.is_ready()
        finally:
            await cancel_all([announcing], again_after_s=0.1)
            with contextlib.suppress(Away):
                await self._release_what_was_left()
                await self._store.fleet.remove_trainer(self._name)

    async def _announce(self) -> None:
        """Keep this trainer visible in the fleet, even while idle."""
        record = msgspec.convert({"id": self._name, **self._capabilities}, TrainerRecord)
        while True:
            with contextlib.suppress(Away):
                await self._store.fleet.register_trainer(record)
            await asyncio.sleep(self.beat_s)

    async def _claim(self) -> Claim | None:
        try:
            await self._release_what_was_left()
            return await self._store.jobs.claim(self._name, unfit=self._unfit, lost_first=True)
        except Away as error:
            get_logger().warning("Redis is unavailable", error=str(error))
            return None

    async def _release_what_was_left(self) -> None:
        """Release jobs so that another trainer can claim them immediately; the attempt does not count."""
        for job, (claim, cause) in list(self._left.items()):
            with contextlib.suppress(Fenced, JobNotFound):
                await self._store.jobs.release(job, claim.token, cause)
            del self._left[job]

    async def _serve(self, claim: Claim, stop: asyncio.Event, leaving: asyncio.Event) -> None:
        log = get_logger().bind(job=claim.job_id, epoch=claim.epoch)
        log.info("claimed")
        try:
            with raising_no_room():
                await self._tell(claim, await self._attempt(claim, stop, leaving))
        except RanksLost:
            raise
        except (Fenced, JobNotFound):  # a wiped server has neither the claim nor the job
            log.warning("the claim was lost; nothing this process has done since takes effect")
        except (Away, NoRoom) as error:
            self._left[claim.job_id] = claim, AWAY if isinstance(error, Away) else NO_ROOM
            log.warning("giving up the job; any trainer may claim it", error=f"{type(error).__name__}: {error}")
        except Exception:
            log.exception("the end of the job could not be recorded; any trainer may claim it")

    async def _attempt(self, claim: Claim, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        job = await self._store.jobs.get(claim.job_id)
        try:
            spec = JobSpec.model_validate_json(job.spec)
        except ValidationError as error:
            return AttemptEnd(
                "failed", "incompatible_release", f"this release does not understand the job's specification: {error}"
            )
        if job.desired_state == "cancelled" and self._unfit(job.spec) is not None:
            return AttemptEnd.because("cancelled", CANCELLED)
        ends: list[AttemptEnd] = []
        leaving_job = asyncio.Event()
        yielded: list[Standstill] = []

        async def attempt() -> None:
            ends.append(await self._attempts.run(claim, spec, stop, leaving_job))

        async def leave() -> None:
            await leaving.wait()
            leaving_job.set()
            await asyncio.Event().wait()

        async def give_way(giving_way: GivingWay) -> None:
            yielded.append(await giving_way.wait(claim.job_id))
            leaving_job.set()
            await asyncio.Event().wait()

        beside = [self._beat(claim), self._free_what_the_lost_held(claim), self._look_at_queued_models(), leave()]
        if self._giving_way is not None:
            beside.append(give_way(self._giving_way))
        await first_to_end(attempt(), *beside)
        if yielded and ends[0].how == "released" and not (stop.is_set() or leaving.is_set()):
            job = await self._store.jobs.get(claim.job_id)
            if job.step == yielded[0].step:  # else it was in the middle of a long step
                return AttemptEnd("yielded", "yielded", yielded[0].message)
        return ends[0]

    async def _tell(self, claim: Claim, end: AttemptEnd) -> None:
        """Turn the end of an attempt into a job state; nothing else does."""
        job, token, store = claim.job_id, claim.token, self._store
        log = get_logger().bind(job=job, epoch=claim.epoch, code=end.code, message=end.message)
        match end.how:
            case "claim_lost":
                raise Fenced(job)
            case "released":
                self._left[job] = claim, StatusReason(end.code, end.message)
                log.info("the job was released; any trainer may claim it")
            case "yielded":
                await store.jobs.yield_trainer(job, token, StatusReason(end.code, end.message))
                log.info("the job gives its trainer to one that waits")
            case "attempt_failed":
                log.warning("this attempt failed")
                if end.code == QUEUE_DAMAGED:  # the next attempt dispatches its groups again
                    await self._bus.empty_queue(job, token)
                await store.jobs.end_attempt(job, token, StatusReason(end.code, end.message))
            case "cancelled":
                await store.jobs.set_status(job, "cancelling", token=token)
                await self._discard_queue(claim)
                await store.jobs.set_status(job, "cancelled", token=token, reason=end.reason)
                log.info("cancelled")
            case "succeeded" | "failed":
                await self._discard_queue(claim)
                await store.jobs.set_status(job, end.how, token=token, reason=end.reason)
                log.info(end.how)

    async def _discard_queue(self, claim: Claim) -> None:
        """Remove untrained groups from Redis; a broken queue must not hide why the job ended."""
        try:
            if groups := await self._bus.open_groups(claim.job_id):
                await self._bus.commit(claim.job_id, claim.token, 0, groups, reason="dropped_job_over")
        except (Fenced, JobNotFound, Away):
            raise
        except Exception as error:
            get_logger().warning("the queue could not be emptied", job=claim.job_id, error=str(error))

    async def _beat(self, claim: Claim) -> None:
        while True:
            await self._store.jobs.beat(claim.job_id, claim.token)
            await asyncio.sleep(self.beat_s)

    async def _look_at_queued_models(self) -> None:
        while True:
            try:
                await self._queued.look()
            except Away:
                pass
            except Exception as error:  # trouble with another job must not end this one
                get_logger().warning("queued jobs could not be looked at", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(QUEUED_LOOK_S)

    async def _free_what_the_lost_held(self, claim: Claim) -> None:
        """Give up lost jobs, mainly to free their engines while all other trainers are busy: this job may need them."""
        while True:
            try:
                for job in await self._store.jobs.give_up_lost(claim.job_id):
                    get_logger().warning("another job lost its trainer and waits for a new one", job=job)
            except Away:
                pass
            except Exception as error:  # trouble with another job must not end this one
                get_logger().warning("could not check other jobs", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(self.beat_s)
