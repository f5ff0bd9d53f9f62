"""Runs one attempt at a claimed job, from loading the model to the end.

Duty: run the step loop, obey requests from the user and the worker, and turn every outcome into one ``AttemptEnd``. It
holds no lease and writes no final status: the worker sends heartbeats and reports the end to Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from gspo_core.learner import UnsupportedModel
from gspo_core.spec import JobSpec
from services.engines.keys import EngineKeys
from services.engines.kinds import open_engines
from services.files.data_dir import DataDir
from services.files.disk_space import NoRoom, raising_no_room
from services.process.cancelling import first_to_end, sleep_unless
from services.process.settings import Settings
from services.process.telemetry import get_logger
from services.state.client import Away, CredentialsRefused, connect
from services.state.queue import Bus, Fenced
from services.state.refusals import Damaged
from services.state.store import CancelManner, Claim, JobNotFound, StatusReason, Store
from services.trainer.building import MakeLearner, listeners, make_learner, make_run
from services.trainer.run import JobRun
from services.trainer.telling.attempt_messages import AttemptEnd
from services.trainer.telling.failure import AWAY, NO_ROOM, QUEUE_DAMAGED, AttemptFailed, JobFailure
from services.trainer.telling.wandb_run import WandbRun

LOOK_S = 0.3
# Unsent data stays on disk after this timeout, for the process of the next attempt.
LISTENERS_S = 5.0


class Attempt:
    """One attempt. ``check`` raises RanksLost if this trainer has lost other ranks."""

    def __init__(self, store: Store, claim: Claim, run: JobRun, check: Callable[[], None] = lambda: None) -> None:
        self._store, self._claim, self._run, self._check = store, claim, run, check

    async def run(self, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        """Run to the end. ``stop`` ends it immediately; ``leaving`` ends it at a step boundary, after saving."""
        try:
            with raising_no_room():
                await first_to_end(self._run.run(), self._pass_wishes_on(stop, leaving))
        except Exception as error:
            return end_of(error)
        assert self._run.phase.end is not None, "the run and its wishes end with a reason alone"
        return self._run.phase.end

    async def _pass_wishes_on(self, stop: asyncio.Event, leaving: asyncio.Event) -> None:
        """Forward requests to the run until one of them ends it immediately."""
        phase = self._run.phase
        while not stop.is_set():
            self._check()
            job = await self._store.jobs.get(self._claim.job_id)
            phase.is_pause_wanted = job.desired_state == "paused"
            if job.desired_state == "cancelled":
                phase.cancel(job.cancel_manner or CancelManner.NOW)
            if leaving.is_set():
                phase.leave()
            if phase.is_over:
                return
            await sleep_unless(stop, LOOK_S)
        phase.stop()


def end_of(error: Exception) -> AttemptEnd:
    """Map an error raised by an attempt to its ``AttemptEnd``."""
    match error:
        case Fenced() | JobNotFound():  # a wiped server has neither the claim nor the job
            return AttemptEnd("claim_lost")
        case AttemptFailed():
            return AttemptEnd("attempt_failed", error.code, str(error))
        case Damaged():
            return AttemptEnd("attempt_failed", QUEUE_DAMAGED, str(error))
        case Away() | CredentialsRefused():
            return AttemptEnd.because("released", AWAY)
        case NoRoom():
            return AttemptEnd.because("released", NO_ROOM)
        case JobFailure():
            reason = StatusReason(error.code, str(error))
        case UnsupportedModel():
            reason = StatusReason("model_invalid", str(error))
        case _:
            said = f"{type(error).__name__}: {error}"
            reason = StatusReason("internal", f"an error inside the service, told in full by the trainer's log: {said}")
    get_logger().error("the attempt failed", exc_info=error)
    return AttemptEnd.because("failed", reason)


async def run_attempt(
    settings: Settings,
    claim: Claim,
    stop: asyncio.Event,
    leaving: asyncio.Event,
    *,
    make: MakeLearner = make_learner,
    check: Callable[[], None] = lambda: None,
) -> AttemptEnd:
    """Run a whole attempt with its own connections."""
    assert settings.redis_url is not None, "the worker has looked"
    async with connect(settings.redis_url) as redis, open_engines(EngineKeys.read(settings.engine_keys)) as engine_at:
        bus = Bus(redis, lease_s=settings.lease_s)
        store = Store(
            redis,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            jobs_dir=DataDir(settings.data_dir).jobs,
            waits_for_room=True,
        )
        told: list[WandbRun] = []
        try:
            spec = JobSpec.model_validate_json((await store.jobs.get(claim.job_id)).spec)
            told = listeners(settings, claim.job_id, spec)
            run = make_run(settings, bus, store, engine_at, claim, spec, told, lambda: make(spec))
        except Exception as error:
            return end_of(error)
        try:
            return await Attempt(store, claim, run, check).run(stop, leaving)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LISTENERS_S):
                    for listener in told:
                        await asyncio.to_thread(listener.close)
