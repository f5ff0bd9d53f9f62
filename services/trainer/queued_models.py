"""Looks at the models of queued jobs while all trainers are busy, so that a wrong path is not found only hours later.

Rule: it changes only the reason of a queued job. The files may still come, so what ends the job is the trainer that
takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gspo_core.model_files import problem_of
from services.state.jobs import JobStatus, StatusReason, default_reason
from services.state.store import Store

CODE: Final = "model_invalid"


class QueuedModels:
    """``unfit`` returns why this trainer cannot run a specification; other trainers look at those jobs."""

    def __init__(self, store: Store, name: str, unfit: Callable[[str], str | None]) -> None:
        self._store, self._name, self._unfit = store, name, unfit

    async def look(self) -> None:
        """One round."""
        for job in await self._store.jobs.queued():
            if self._unfit(job.spec) is not None:
                continue
            problem = await asyncio.to_thread(problem_of, Path(str(job.spec_data["model"])))
            is_told = job.status_reason is not None and job.status_reason.code == CODE
            if problem is not None:
                message = f"{problem} (where {self._name} runs); the job fails if that is so when a trainer takes it"
                await self._store.jobs.explain_queued(job.id, StatusReason(CODE, message))
            elif is_told:
                await self._store.jobs.explain_queued(job.id, default_reason(JobStatus.QUEUED))
