"""Decides when a job that makes no progress gives its trainer to one that waits for it.

Rule: progress is, as Redis has it, a step that ends, a late reward that comes, or a piece of an episode that arrives. A
piece counts for nothing while the environment fails at every worker, or once rewards have failed to come: such a job
begins episode after episode and ends none that it could train on. Loading and a pause are not looked at. A job that
gave way itself counts as waiting only after a rest, twice as long each time: two jobs that both stand still take turns,
ever more slowly, and one that works is never held up by them for longer than one turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.state.client import Away
from services.state.jobs import DesiredState, JobRecord, JobStatus
from services.state.leases import BeatWatch
from services.state.queue import Bus
from services.state.store import Store
from services.trainer.telling.blockers import SILENCE_S
from services.trainer.telling.unhealthy_environments import fails_everywhere

LOOK_S = 5.0
LOOKS_PER_TURN = 10
# A rest doubles so often at most: with turns of a quarter of an hour, up to four hours.
MAX_DOUBLINGS = 4
_LOADING = "loading_model"


@dataclass(frozen=True, slots=True)
class Standstill:
    message: str
    step: int


@dataclass(frozen=True, slots=True)
class Signs:
    """What one look at a job shows."""

    settled: tuple[int, int | None, int]
    """Step, version, and rewards that came late: none of them moves in vain."""
    newest: str
    """The newest piece of an episode."""
    num_missed: int
    """Rewards that never came."""
    is_ill: bool
    """Its environment fails wherever it is played."""

    def are_progress_since(self, earlier: Signs) -> bool:
        if self.settled != earlier.settled:
            return True
        return self.newest != earlier.newest and not self.why_in_vain(earlier)

    def why_in_vain(self, earlier: Signs) -> str:
        """Why pieces that arrived since came to nothing; empty if that is not known."""
        missed = self.num_missed - earlier.num_missed
        if missed > 0:
            return f"{missed} rewards did not come in time"
        return "its environment fails at every worker" if self.is_ill else ""


class GivingWay:
    """``unfit`` returns why this trainer cannot run a specification. Time is this process's own."""

    def __init__(
        self,
        store: Store,
        bus: Bus,
        unfit: Callable[[str], str | None],
        after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._bus, self._unfit, self._after_s, self._clock = store, bus, unfit, after_s, clock
        self._rests_since: dict[str, tuple[int, float]] = {}
        """Job -> how often it had given way when this was first seen, and when that was."""
        self._watch = BeatWatch(SILENCE_S, time.monotonic)

    async def wait(self, own: str) -> Standstill:
        """Return when the job ``own`` is to give way."""
        seen: Signs | None = None
        since = self._clock()
        while True:
            await asyncio.sleep(min(LOOK_S, self._after_s / LOOKS_PER_TURN))
            try:
                job = await self._store.jobs.get(own)
                signs = await self._signs(job)
                waiting = await self._waiting()  # at every look, since it is what times the rests of others
            except Away:
                continue
            if signs is None or seen is None or signs.are_progress_since(seen):
                seen, since = signs, self._clock()
            elif waiting and (idle_s := self._clock() - since) >= self._after_s:
                return Standstill(_words(job, signs, seen, idle_s, len(waiting)), job.step)

    async def _signs(self, job: JobRecord) -> Signs | None:
        """None while there is nothing to wait for."""
        is_loading = job.status_reason is not None and job.status_reason.code == _LOADING
        is_at_work = job.status in (JobStatus.STARTING, JobStatus.RUNNING) and not is_loading
        if not is_at_work or job.desired_state is not DesiredState.RUNNING:
            return None
        rewards = await self._bus.waiting(job.id)
        workers = [one for one in await self._store.fleet.workers() if not self._watch.stands_still(one.id, one.beats)]
        return Signs(
            settled=(job.step, job.policy_version, rewards.num_late),
            newest=await self._bus.newest_segment(job.id),
            num_missed=rewards.num_missed,
            is_ill=fails_everywhere(job.id, workers),
        )

    async def _waiting(self) -> list[JobRecord]:
        """The jobs that this trainer could take, and that are not resting."""
        queued = await self._store.jobs.queued()
        self._rests_since = {job.id: self._rest_of(job) for job in queued if job.num_yields}
        return [
            job
            for job in queued
            if job.desired_state is DesiredState.RUNNING and self._unfit(job.spec) is None and not self._rests(job)
        ]

    def _rest_of(self, job: JobRecord) -> tuple[int, float]:
        known = self._rests_since.get(job.id)
        return known if known is not None and known[0] == job.num_yields else (job.num_yields, self._clock())

    def _rests(self, job: JobRecord) -> bool:
        if not job.num_yields:
            return False
        rest_s = self._after_s * (1 << min(job.num_yields - 1, MAX_DOUBLINGS))
        return self._clock() - self._rests_since[job.id][1] < rest_s


def _words(job: JobRecord, signs: Signs, seen: Signs, idle_s: float, num_waiting: int) -> str:
    why = "" if job.status_reason is None else f" ({job.status_reason.code}: {job.status_reason.message})"
    others = "another job" if num_waiting == 1 else f"{num_waiting} other jobs"
    in_vain = signs.why_in_vain(seen) if signs.newest != seen.newest else ""
    still = f"and what was played came to nothing: {in_vain}" if in_vain else "and no piece of an episode arrived"
    return (
        f"for {idle_s:.0f} s no step ended, {still}{why}; {others} waited for a trainer, and "
        "this one comes back when none waits that has not had its turn"
    )
