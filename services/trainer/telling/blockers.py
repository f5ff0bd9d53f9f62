"""Shows on a running job what keeps it from moving: no engine, no player, or an environment that is ill.

Rule: it changes only the reason of a running job, and restores the earlier one when the blocker is over. It ends
nothing; ``UnhealthyEnvironments`` judges when an environment has failed for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from gspo_core.bounds import reaches
from services.state.fleet_records import WorkerKind, WorkerRecord
from services.state.jobs import IllegalTransition, JobStatus, StatusReason, WaitCode, default_reason
from services.state.leases import BeatWatch
from services.state.store import Claim, Store
from services.trainer.telling.players import PLAYERS
from services.trainer.telling.unhealthy_environments import UnhealthyEnvironments, complaint_of

POLL_S = 1.0
# A worker registers every two seconds.
SILENCE_S = 15.0
# A changed message is an event, and an engine that fails again and again changes its words every second.
RETELL_S = 15.0

NO_ENGINE: WaitCode = "no_engine_for_model"
NO_WORKER: WaitCode = "no_rollout_worker"
ILL: WaitCode = "env_unhealthy"
UNHEARD = "agents end without a request: can they reach the gateway under GSPO_GATEWAY_URL?"


class ServingEngines(Protocol):
    """The part of the engine pool used here."""

    def absence(self) -> str | None:
        """The engines that served last and what became of them; None while one serves."""


class Blockers:
    """Call ``run``; it lasts until cancelled, or until ``ill`` raises JobFailure."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        engines: ServingEngines,
        ill: UnhealthyEnvironments,
        kind: WorkerKind = "rollout",
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._claim, self._engines, self._ill = store, claim, engines, ill
        self._kind: WorkerKind = kind
        self._clock, self._now = clock, now
        self._watch = BeatWatch(SILENCE_S, clock)
        self._last_workers: Sequence[str] = ()
        self._since: Mapping[WaitCode, str] = {}
        """Each blocker of the last round, with the time of day when it began."""
        self._found: Mapping[WaitCode, str] = {}
        self._told_at = 0.0
        self._displaced: StatusReason | None = None
        """The reason shown before the blocker."""

    @property
    def excuse(self) -> str:
        """Why no other trainer could make progress either; empty if there is no such reason."""
        return "; ".join(text for code, text in self._found.items() if code != ILL)

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """One round."""
        workers = [one for one in await self._store.fleet.workers() if one.kind == self._kind and self._plays(one)]
        self._found = self._blockers(workers)
        job = await self._store.jobs.get(self._claim.job_id)
        if job.status is not JobStatus.RUNNING:
            return
        await self._show(job.status_reason or default_reason(JobStatus.RUNNING))
        self._ill.judge(self._claim.job_id, workers)

    def _plays(self, worker: WorkerRecord) -> bool:
        is_silent = self._watch.stands_still(worker.id, worker.beats)
        has_left = worker.draining and not worker.num_episodes
        return not (is_silent or has_left)

    def _blockers(self, workers: Sequence[WorkerRecord]) -> Mapping[WaitCode, str]:
        """Code and sentence of each blocker, the most fundamental first."""
        absence, complaint = self._engines.absence(), complaint_of(self._claim.job_id, workers)
        is_unheard = bool(workers) and all(one.hears_no_agent for one in workers)
        codes = {NO_ENGINE: absence is not None, NO_WORKER: not workers, ILL: complaint is not None or is_unheard}
        at = datetime.fromtimestamp(self._now(), UTC).strftime("%H:%M:%S UTC")
        self._since = since = {code: self._since.get(code, at) for code, is_there in codes.items() if is_there}
        found: dict[WaitCode, str] = {}
        if absence is not None:
            found[NO_ENGINE] = f"no engine has served this job since {since[NO_ENGINE]}{_listed(absence)}"
        if not workers:
            last = ", ".join(self._last_workers)
            found[NO_WORKER] = f"no {PLAYERS[self._kind]} has been alive since {since[NO_WORKER]}{_listed(last)}"
        elif complaint is not None:
            found[ILL] = complaint
        elif is_unheard:
            found[ILL] = UNHEARD
        self._last_workers = [one.id for one in workers] or self._last_workers
        return found

    async def _show(self, shown: StatusReason) -> None:
        is_ours = shown.code in (NO_ENGINE, NO_WORKER, ILL)
        if not self._found:
            if is_ours:
                await self._say(self._displaced or default_reason(JobStatus.RUNNING))
            self._displaced = None
            return
        if not is_ours:
            self._displaced = shown
        code, message = next(iter(self._found)), "; ".join(self._found.values())
        is_due = code != shown.code or reaches(self._clock() - self._told_at, RETELL_S, "a time")
        if is_due and (code, message) != (shown.code, shown.message):
            self._told_at = self._clock()
            await self._say(StatusReason(code, message))

    async def _say(self, reason: StatusReason) -> None:
        job, token = self._claim.job_id, self._claim.token
        with contextlib.suppress(IllegalTransition):  # no longer running
            await self._store.jobs.set_status(job, JobStatus.RUNNING, token=token, reason=reason)


def _listed(last: str) -> str:
    return f"; last there: {last}" if last else ""
