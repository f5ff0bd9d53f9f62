"""The control plane's state, one door to its parts: jobs and leases on them, events, versions, fleet, metrics.

Duty: builds the parts on one connection; users take the part that they need (``store.jobs``, ``store.fleet``). The rule
that all parts keep: whatever a client sends again changes nothing, and what an owner writes is fenced by its token.
It knows nothing of what a specification says.

With ``jobs_dir`` the jobs' directories are the truth and Redis may be lost: what is acknowledged is written down there
first, and a server that was wiped is given it back by the first process that notices (``rebuild``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from services.files.job_dir import JobsDir
from services.state.client import RedisClient
from services.state.environments import EnvironmentDescriptions
from services.state.events import EventLog, JobEvent
from services.state.fleet import Fleet
from services.state.functions import Functions
from services.state.job_table import JobTable
from services.state.jobs import (
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
)
from services.state.leases import BeatWatch
from services.state.metrics import MetricSeries
from services.state.rebuild import Rebuild
from services.state.refusals import Conflict, Fenced
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
        self._rebuild = None if jobs_dir is None else Rebuild(self._functions, jobs_dir)
        self.jobs = JobTable(
            self._functions,
            BeatWatch(lease_s, clock),
            now,
            max_attempts=max_attempts,
            jobs_dir=jobs_dir,
            rebuild=self._rebuild,
            waits_for_room=waits_for_room,
        )
        self.events = EventLog(self._functions)
        self.versions = VersionTable(self._functions, jobs_dir)
        self.fleet = Fleet(self._functions)
        self.metrics = MetricSeries(self._functions)
        self.environments = EnvironmentDescriptions(self._functions, jobs_dir, waits_for_room=waits_for_room)

    async def load_functions(self) -> None:
        """Make sure that the server has our functions; raises LibraryTooOld, LibraryTooNew."""
        await self._functions.load()

    async def rebuild(self) -> int:
        """Give the server what it does not know, or knows an older state of; returns how many jobs that were.

        Processes with ``jobs_dir`` call it when they start. Later a wiped server is noticed by listing, claiming,
        creating and not finding jobs.
        """
        return 0 if self._rebuild is None else await self._rebuild.run()
