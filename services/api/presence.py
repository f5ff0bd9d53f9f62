"""Which of the registered processes are alive, as far as this process has seen.

One rule: a process is gone when its counter was seen standing still for a whole lease on our own clock; what was not
watched for long enough counts as alive. It takes nothing from anyone and decides nothing but what people are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from services.away import Away
from services.cancelling import cancel_all
from services.leases import BeatWatch
from services.store import Store

LOOKS_PER_LEASE = 5


class Presence:
    def __init__(self, store: Store, lease_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._lease_s = lease_s
        self._watch = BeatWatch(lease_s, clock)
        self._looking: asyncio.Task[list[dict[str, Any]]] | None = None

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            with contextlib.suppress(Away):
                await self.members()
            await asyncio.sleep(self._lease_s / LOOKS_PER_LEASE)

    async def members(self) -> list[dict[str, Any]]:
        """Every registered process: its record, its role and whether it is alive. Who asks while somebody is being
        answered gets the same answer."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="looking at processes")
            # Who asked may have gone when it fails.
            self._looking.add_done_callback(lambda looking: looking.cancelled() or looking.exception())
        return await asyncio.shield(self._looking)

    async def close(self) -> None:
        """Nobody waits for an answer any more."""
        if self._looking is not None:
            await cancel_all([self._looking], again_after_s=0.1)

    async def _look(self) -> list[dict[str, Any]]:
        trainers, workers, engines = await self._store.processes()
        return [
            *(self._seen("trainer", record) for record in trainers),
            *(self._seen("rollout", record) for record in workers),
            *(self._seen("engine", record) for record in engines),
        ]

    def _seen(self, role: str, record: dict[str, Any]) -> dict[str, Any]:
        is_gone = self._watch.stands_still((role, record["id"]), record["beats"])
        return {"object": "worker", "role": role, **record, "alive": not is_gone}
