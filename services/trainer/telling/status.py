"""A trainer's exchange with the control plane about its job: status and reasons out, the user's wish to pause in.

A job that does not move always shows why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.state.jobs import WaitCode, default_reason
from services.state.store import Claim, DesiredState, JobStatus, StatusReason, Store

POLL_S = 0.2


class JobStatusBoard:
    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._claim = claim

    async def explain(self, code: WaitCode, message: str) -> None:
        """Report why the job does not move yet."""
        await self._set(JobStatus.STARTING, StatusReason(code, message))

    async def begin(self) -> None:
        """A job that was paused when its trainer died stays paused."""
        job = await self._store.jobs.get(self._claim.job_id)
        if job.status is JobStatus.PAUSED:
            await self._wait_for_resume()
            await self._set(JobStatus.STARTING)

    async def started(self) -> None:
        await self._set(JobStatus.RUNNING)

    async def waits(self, message: str) -> None:
        """Report what a running job waits for."""
        await self._set(JobStatus.RUNNING, StatusReason("waiting_for_trajectories", message))

    async def still_waits(self, message: str) -> None:
        """The same in newer words, which are no event."""
        reason = StatusReason("waiting_for_trajectories", message)
        await self._store.jobs.retell(self._claim.job_id, self._claim.token, reason)

    async def goes_on(self) -> None:
        """Clear the reason for waiting."""
        await self._set(JobStatus.RUNNING, default_reason(JobStatus.RUNNING))

    async def winds_up(self) -> None:
        """Report why a cancelled job still runs."""
        message = "cancelled; groups in flight are trained first, as far as they fill whole steps"
        await self._set(JobStatus.RUNNING, StatusReason("user_cancelled", message))

    async def obey_pause(self, is_leaving: Callable[[], bool] = lambda: False) -> bool:
        """Hold the step loop while the user wants the job paused; returns whether it had to wait.
        A trainer that leaves meanwhile leaves the job paused."""
        if await self._desired() is not DesiredState.PAUSED:
            return False
        await self._set(JobStatus.PAUSING)
        await self._set(JobStatus.PAUSED, StatusReason("user_paused", "paused by the user"))
        if await self._wait_for_resume(is_leaving):
            await self._set(JobStatus.RUNNING)
        return True

    async def _wait_for_resume(self, is_leaving: Callable[[], bool] = lambda: False) -> bool:
        while await self._desired() is DesiredState.PAUSED:
            if is_leaving():
                return False
            await asyncio.sleep(POLL_S)
        await self._set(JobStatus.RESUMING)
        return True

    async def _desired(self) -> DesiredState:
        return (await self._store.jobs.get(self._claim.job_id)).desired_state

    async def _set(self, status: JobStatus, reason: StatusReason | None = None) -> None:
        await self._store.jobs.set_status(self._claim.job_id, status, token=self._claim.token, reason=reason)
