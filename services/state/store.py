"""The control plane's state behind one object: jobs and leases on them, events, versions, fleet, metrics.

Duty: build the parts on one connection; callers take the part they need (``store.jobs``, ``store.fleet``). The rule for
all parts: a resend changes nothing, and an owner's writes are fenced by its token.
It does not interpret specifications.

With ``jobs_dir`` the jobs' directories are the truth and Redis may be lost: changes are saved there before they are
acknowledged, and the first process to notice a wiped server restores it (``rebuild``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gspo_core.log.events import JobEvent
from services.state.client import RedisClient
from services.state.fleet import Fleet
from services.state.functions import Functions
from services.state.job_table import JobTable
from services.state.jobs import (
    CancelManner,
    Claim,
    DesiredState,
    IllegalTransition,
    InvalidCursor,
    JobConflict,
    JobInUse,
    JobNotFound,
    JobRecord,
    JobStatus,
    StatusReason,
    TrainerAttempt,
)
from services.state.leases import BeatWatch
from services.state.refusals import Conflict, Fenced
from services.state.reports import EnvironmentDescriptions, EventLog, MetricSeries
from services.state.versions import Version, VersionTable

if TYPE_CHECKING:
    from services.files.job_dir import JobsDir
    from services.files.job_records import SavedJobs
    from services.state.rebuild import Rebuild

__all__ = [
    "CancelManner",
    "Claim",
    "Conflict",
    "DesiredState",
    "Fenced",
    "IllegalTransition",
    "InvalidCursor",
    "JobConflict",
    "JobEvent",
    "JobInUse",
    "JobNotFound",
    "JobRecord",
    "JobStatus",
    "StatusReason",
    "Store",
    "TrainerAttempt",
    "Version",
]


class Store:
    """``lease_s``: a trainer whose beat stands still this long loses its job. ``now`` is only shown to people.

    ``max_attempts``: a job fails after losing this many trainers in a row without a new step.
    ``waits_for_room``: a write to a full disk waits for room instead of raising.
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
        saved: SavedJobs | None = None
        self._rebuild: Rebuild | None = None
        if jobs_dir is not None:
            # What plays episodes saves and restores no job.
            from services.files.job_records import SavedJobs
            from services.state.rebuild import Rebuild

            saved = SavedJobs(jobs_dir, waits_for_room=waits_for_room)
            self._rebuild = Rebuild(self._functions, jobs_dir)
        self.jobs = JobTable(
            self._functions,
            BeatWatch(lease_s, clock),
            now,
            max_attempts=max_attempts,
            saved=saved,
            rebuild=self._rebuild,
        )
        self.events = EventLog(self._functions)
        self.versions = VersionTable(self._functions, saved)
        self.fleet = Fleet(self._functions)
        self.metrics = MetricSeries(self._functions)
        self.environments = EnvironmentDescriptions(self._functions, saved)

    @property
    def functions(self) -> Functions:
        """For operations that only some processes need."""
        return self._functions

    async def load_functions(self) -> None:
        """Make sure the server has our functions; raises LibraryTooOld, LibraryTooNew."""
        await self._functions.load()

    async def rebuild(self) -> int:
        """Restore jobs that the server lacks or knows in an older state; returns how many.

        Processes with ``jobs_dir`` call it when they start. Later, listing, claiming, creating and failing
        to find jobs detect a wiped server.
        """
        return 0 if self._rebuild is None else await self._rebuild.run()
