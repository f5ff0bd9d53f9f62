"""Rollout workers' descriptions of a job's environments: the number of tasks, or why loading failed.

No environment code runs in the trainer. A complaint immediately becomes the reason why the job is stuck; if no worker
can load the environments within ``PATIENCE_S`` of the first complaint, the job fails with it and frees the trainer for
the jobs behind it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gspo_core.types import Split
from services.state.fleet_records import WorkerKind
from services.state.store import Store
from services.trainer.telling.failure import JobFailure
from services.trainer.telling.players import PLAYERS
from services.trainer.telling.status import JobStatusBoard

POLL_S = 0.2
# A worker retries every ten seconds, and another worker may have what the first one lacks.
PATIENCE_S = 30.0


class DescribedEnvironments:
    """Waits for the descriptions of one job."""

    def __init__(
        self,
        store: Store,
        job: str,
        status: JobStatusBoard,
        *,
        kind: WorkerKind = "rollout",
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._job = job
        self._status = status
        self._player = PLAYERS[kind]
        self._patience_s = patience_s
        self._clock = clock
        self._read_up_to = "0"
        self._complaint = ""
        self._complained_at: float | None = None

    async def num_tasks(self, num_environments: int) -> dict[Split, list[int]]:
        """Task counts per environment. Raises ``JobFailure`` if no worker can load one."""
        await self._status.explain("waiting_for_workers", f"no {self._player} has described the environments yet")
        counts = []
        for index in range(num_environments):
            while (description := await self._store.environments.get(self._job, index)) is None:
                await self._heed_complaints()
                await asyncio.sleep(POLL_S)
            counts.append(description["num_tasks"])
        return {split: [int(count[split.value]) for count in counts] for split in Split}

    async def _heed_complaints(self) -> None:
        for event in await self._store.events.read(self._job, self._read_up_to):
            self._read_up_to = event.id
            if event.type == "env.health" and not event.data["healthy"]:
                await self._note(f"{event.data['worker']}: {event.data['error']}")
        if self._complained_at is not None and self._clock() - self._complained_at >= self._patience_s:
            raise JobFailure("env_unhealthy", f"no {self._player} can load the environments. {self._complaint}")

    async def _note(self, complaint: str) -> None:
        if self._complained_at is None:
            self._complained_at = self._clock()
        if complaint != self._complaint:
            self._complaint = complaint
            await self._status.explain("env_unhealthy", complaint)
