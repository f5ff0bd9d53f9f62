"""Reports on a running job that one of its environments is ill, for as long as a live rollout worker reports it.

Rule: it changes only the reason of a running job. Workers play an ill environment only to test whether it has
recovered; the episodes they hold wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

from services.state.fleet_records import WorkerRecord
from services.state.jobs import IllegalTransition, JobStatus, StatusReason, default_reason
from services.state.leases import BeatWatch
from services.state.store import Claim, Store

POLL_S = 1.0
# A worker registers every two seconds.
SILENCE_S = 15.0
CODE = "env_unhealthy"


class IllEnvironments:
    """Call ``run``; it lasts until cancelled."""

    def __init__(self, store: Store, claim: Claim, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._claim = claim
        self._watch = BeatWatch(SILENCE_S, clock)

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """One round."""
        workers = [one for one in await self._store.fleet.workers() if not self._watch.stands_still(one.id, one.beats)]
        complaint = complaint_of(self._claim.job_id, workers)
        job = await self._store.jobs.get(self._claim.job_id)
        if job.status is not JobStatus.RUNNING:
            return
        code, message = (job.status_reason.code, job.status_reason.message) if job.status_reason else ("", "")
        if complaint is not None and (code, message) != (CODE, complaint):
            await self._say(StatusReason(CODE, complaint))
        elif complaint is None and code == CODE:
            await self._say(default_reason(JobStatus.RUNNING))

    async def _say(self, reason: StatusReason | None) -> None:
        job, token = self._claim.job_id, self._claim.token
        with contextlib.suppress(IllegalTransition):  # no longer running
            await self._store.jobs.set_status(job, JobStatus.RUNNING, token=token, reason=reason)


def complaint_of(job: str, workers: Iterable[WorkerRecord]) -> str | None:
    """The first complaint by a worker about ``job``."""
    serving = [one for one in workers if job in one.jobs]
    complaining = [(one.id, ill) for one in serving if (ill := one.ill_environments.get(job))]
    if not complaining:
        return None
    worker, ill = complaining[0]
    environment, error = next(iter(ill.items()))
    return f"{environment} fails at {len(complaining)} of {len(serving)} workers; {worker}: {error}"
