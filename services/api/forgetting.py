"""Erases what was read and said in trained episodes once it is older than is to be kept.

Rule: each job's directory is looked through by itself, for a log that was brought there is as old as it is there. What
``services.files.erasing`` leaves alone, since a job that is not over may have to train it again, is left
until a later time; so is what cannot be done now. Jobs are taken one by one, so a large one holds up no request. What
is in the queue is as young as its job's next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.api.routes.erasing import safe_until
from services.files.job_dir import JobDir, JobsDir
from services.process.telemetry import get_logger
from services.state.client import Away, RedisFault
from services.state.jobs import JobNotFound
from services.state.store import Store

EVERY_S = 3600.0
DAY_S = 24 * 3600.0


class Forgetting:
    """Erases old trained episodes of all jobs."""

    def __init__(self, store: Store, jobs_dir: JobsDir, now: Callable[[], float] = time.time) -> None:
        """``now``: Unix seconds."""
        self._store = store
        self._jobs_dir = jobs_dir
        self._now = now
        self._done: dict[str, float] = {}
        """By job: nothing is left of what was written before this time."""

    async def run(self, keep_days: float | None, every_s: float = EVERY_S) -> None:
        """``keep_days``: None for ever. It does not return."""
        if keep_days is None:
            await asyncio.Event().wait()
        while keep_days is not None:
            try:
                await self.forget(self._now() - keep_days * DAY_S)
            except (Away, RedisFault, OSError) as error:
                get_logger().warning("old episodes are erased later", error=str(error))
            await asyncio.sleep(every_s)

    async def forget(self, before: float) -> int:
        """How many episodes are erased, of logs written before (Unix seconds)."""
        jobs, count = await asyncio.to_thread(self._jobs_dir.accepted), 0
        for name, place in jobs.items():
            try:
                count += await self._forget(name, place, before)
            except OSError as error:  # those of other jobs can be erased all the same
                get_logger().warning("old episodes of a job are erased later", job=name, error=str(error))
        return count

    async def _forget(self, name: str, place: JobDir, before: float) -> int:
        from services.files.erasing import erase_old, has_log, saved_step  # most installations need none of it

        if not await asyncio.to_thread(has_log, place, self._done.get(name, 0.0), before):
            return 0
        try:
            until = await asyncio.to_thread(safe_until, place, await self._store.jobs.get(name))
        except JobNotFound:  # it is being removed, or Redis has lost it and its trainer may bring it back
            until = await asyncio.to_thread(saved_step, place)
        found = await asyncio.to_thread(erase_old, place, name, safe_until=until, before=before)
        if found.erased:
            get_logger().info("old episodes erased", job=name, episodes=len(found.erased), left=len(found.not_yet))
        if not found.not_yet:
            self._done[name] = before
        return len(found.erased)
