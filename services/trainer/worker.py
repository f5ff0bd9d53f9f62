"""Claims jobs one after the other and runs them; what ends a run decides the job's last state.

Rule: a job that was claimed reaches a terminal state, or its claim lapses and another trainer goes on with it. What
is away for a while (Redis, room on the disk) never decides that a job has failed, nor counts as a failed attempt, and
no job ends this process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from gspo_core.spec import JobSpec
from services.bus import Fenced
from services.cancelling import cancel_all
from services.fleet_records import TrainerRecord
from services.jobs import fits
from services.redis_client import is_away, unless_away
from services.room import lacks_room
from services.store import CancelManner, Claim, JobNotFound, StatusReason, Store
from services.telemetry import get_logger
from services.trainer.failure import AttemptFailed, JobFailure
from services.trainer.followers import RanksLost
from services.trainer.ill_environments import IllEnvironments
from services.trainer.race import first_to_end
from services.trainer.run import JobRun

IDLE_POLL_S = 0.3
BEAT_S = 2.0
# A beat is at most a fifth of the lease, so that four may be lost.
BEATS_PER_LEASE = 5

CANCELLED = StatusReason("user_cancelled", "cancelled on request")
AWAY = StatusReason("redis_unavailable", "its trainer could not reach Redis, or was refused for a while")
NO_ROOM = StatusReason("disk_full", "its trainer found no room to write")

MakeRun = Callable[[Claim, JobSpec], JobRun]


class Cancelled(Exception):
    """The user wants this job to end."""


class Stopped(Exception):
    """This process was asked to stop, or to leave; the job is left to another trainer."""


class TrainerWorker:
    def __init__(
        self,
        store: Store,
        name: str,
        make_run: MakeRun,
        *,
        lease_s: float = 30.0,
        capabilities: Mapping[str, Any] = MappingProxyType({}),
        check: Callable[[], None] = lambda: None,
        unfit: Callable[[str], str | None] = fits,
    ) -> None:
        """``check`` raises RanksLost when other ranks of this trainer are gone: its process ends then. ``unfit`` says
        why a specification is not for this trainer."""
        self._store = store
        self._name = name
        self._make_run = make_run
        self._capabilities = capabilities
        self._check = check
        self._unfit = unfit
        self._left: dict[str, tuple[Claim, StatusReason]] = {}
        """Jobs that could not be released when they were left, and why they were."""
        self.beat_s = min(BEAT_S, lease_s / BEATS_PER_LEASE)

    async def run(self, stop: asyncio.Event, leaving: asyncio.Event | None = None) -> None:
        """Until ``stop`` is set, which ends an attempt where it is, or ``leaving``, which ends it at a step boundary,
        saved."""
        leaving = leaving or asyncio.Event()
        announcing = asyncio.create_task(self._announce(), name="announce")
        try:
            while not (stop.is_set() or leaving.is_set()):
                self._check()
                claim = await self._claim()
                if claim is None:
                    await _sleep_unless(stop, IDLE_POLL_S)
                    continue
                await self._serve(claim, stop, leaving)
        finally:
            await cancel_all([announcing], again_after_s=0.1)
            with unless_away():
                await self._release_what_was_left()
                await self._store.remove_trainer(self._name)

    async def _announce(self) -> None:
        """So that people see who trains, also while nothing is to be trained."""
        record = TrainerRecord(id=self._name, **self._capabilities)
        while True:
            with unless_away():
                await self._store.register_trainer(record)
            await asyncio.sleep(self.beat_s)

    async def _claim(self) -> Claim | None:
        try:
            await self._release_what_was_left()
            return await self._store.claim_job(self._name, unfit=self._unfit, lost_first=True)
        except Exception as error:
            if not is_away(error):
                raise
            get_logger().warning("Redis is away", error=str(error))
            return None

    async def _release_what_was_left(self) -> None:
        """It is free at once then, and nobody's fault."""
        for job, (claim, cause) in list(self._left.items()):
            with contextlib.suppress(Fenced, JobNotFound):
                await self._store.release_job(job, claim.token, cause)
            del self._left[job]

    async def _serve(self, claim: Claim, stop: asyncio.Event, leaving: asyncio.Event) -> None:
        log = get_logger().bind(job=claim.job_id, epoch=claim.epoch)
        log.info("claimed")
        try:
            await self._run_to_its_end(claim, stop, leaving)
        except RanksLost:
            raise
        except (Fenced, JobNotFound):  # a server that was wiped knows neither
            log.warning("the claim was lost; what this process did since then has no effect")
        except Exception as error:
            if is_away(error) or lacks_room(error):
                self._left[claim.job_id] = claim, AWAY if is_away(error) else NO_ROOM
                log.warning("the job is left to whoever claims it next", error=f"{type(error).__name__}: {error}")
            else:
                log.exception("the end of the job could not be told; it is left to whoever claims it next")

    async def _run_to_its_end(self, claim: Claim, stop: asyncio.Event, leaving: asyncio.Event) -> None:
        log = get_logger().bind(job=claim.job_id, epoch=claim.epoch)
        job = await self._store.get_job(claim.job_id)
        try:
            spec = JobSpec.model_validate_json(job.spec)
        except ValidationError as error:
            reason = StatusReason("incompatible_release", f"this release does not know such a specification: {error}")
            await self._store.set_status(claim.job_id, "failed", token=claim.token, reason=reason)
            return
        run = self._make_run(claim, spec)
        try:
            if job.desired_state == "cancelled" and self._unfit(job.spec) is not None:
                raise Cancelled
            watching = IllEnvironments(self._store, claim).run(), self._watch_for_the_end(claim, run, stop, leaving)
            await first_to_end(run.run(), self._beat(claim), self._free_what_the_lost_held(claim), *watching)
            if run.has_left:
                raise Stopped
            if run.cancelled is not None:
                raise Cancelled
            await run.discard_queue()
            await self._store.set_status(claim.job_id, "succeeded", token=claim.token, reason=run.ending)
            log.info("succeeded", why=run.ending.message if run.ending else None)
        except Cancelled:
            await self._store.set_status(claim.job_id, "cancelling", token=claim.token)
            await run.discard_queue()
            await self._store.set_status(claim.job_id, "cancelled", token=claim.token, reason=CANCELLED)
            log.info("cancelled")
        except AttemptFailed as error:
            log.warning("this attempt is over", cause=error.code, message=str(error))
            await self._store.end_attempt(claim.job_id, claim.token, StatusReason(error.code, str(error)))
            self._check()
        except Stopped:
            await self._store.release_job(claim.job_id, claim.token)
            log.info("left to another trainer")
        except (Fenced, JobNotFound):
            raise
        except Exception as error:
            if lacks_room(error) or is_away(error):  # no reason for a job to end
                raise
            log.exception("failed")
            await run.discard_queue()
            await self._store.set_status(claim.job_id, "failed", token=claim.token, reason=_cause(error))

    async def _beat(self, claim: Claim) -> None:
        while True:
            await self._store.beat_trainer(claim.job_id, claim.token)
            await asyncio.sleep(self.beat_s)

    async def _free_what_the_lost_held(self, claim: Claim) -> None:
        """Above all the engines of a job whose trainer died while all others are busy: this job may wait for them."""
        while True:
            try:
                for job in await self._store.give_up_lost_jobs(claim.job_id):
                    get_logger().warning("the trainer of another job was lost; that job waits for one", job=job)
            except Exception as error:  # trouble of another job is no reason to end this one
                if not is_away(error):
                    get_logger().warning("other jobs could not be looked at", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(self.beat_s)

    async def _watch_for_the_end(self, claim: Claim, run: JobRun, stop: asyncio.Event, leaving: asyncio.Event) -> None:
        while not stop.is_set():
            self._check()
            job = await self._store.get_job(claim.job_id)
            run.is_pause_wanted = job.desired_state == "paused"
            if job.desired_state == "cancelled" and not run.wind_up(job.cancel_manner or CancelManner.NOW):
                raise Cancelled
            if leaving.is_set() and not run.is_leaving and not run.leave():
                break
            await _sleep_unless(stop, IDLE_POLL_S)
        raise Stopped


def _cause(error: Exception) -> StatusReason:
    if isinstance(error, JobFailure):
        return StatusReason(error.code, str(error))
    return StatusReason("internal", f"{type(error).__name__}: {error}")


async def _sleep_unless(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
