"""Which of the registered processes are alive, as far as this process has seen.

One rule: a process is gone once its counter has stood still for a whole lease on our own clock; a process not watched
for that long counts as alive. Presence is for display only: it takes no lease away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from services.process.cancelling import cancel_all
from services.state.client import Away
from services.state.fleet_records import WORKER_KINDS, EngineRecord, TrainerRecord, WorkerKind, WorkerRecord
from services.state.leases import BeatWatch
from services.state.store import Store

LOOKS_PER_LEASE = 5
Role = Literal["trainer", WorkerKind, "engine"]
ROLES: tuple[Role, ...] = get_args(Role)
AnyRecord = TrainerRecord | WorkerRecord | EngineRecord


@dataclass(frozen=True)
class RegisteredProcess:
    """A registered process."""

    record: AnyRecord
    is_alive: bool

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def role(self) -> Role:
        match self.record:
            case TrainerRecord():
                return "trainer"
            case WorkerRecord():
                return next((kind for kind in WORKER_KINDS if kind == self.record.kind), "rollout")
        return "engine"

    @property
    def draining(self) -> bool:
        """It was asked to leave, or to be left alone, and its record says so."""
        return not isinstance(self.record, TrainerRecord) and self.record.draining


class Presence:
    def __init__(self, store: Store, lease_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._lease_s = lease_s
        self._watch = BeatWatch(lease_s, clock)
        self._looking: asyncio.Task[list[RegisteredProcess]] | None = None

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            with contextlib.suppress(Away):
                await self.members()
            await asyncio.sleep(self._lease_s / LOOKS_PER_LEASE)

    async def members(self) -> list[RegisteredProcess]:
        """Every registered process. Callers that ask at the same time share one answer, which is no older than their
        question."""
        if self._looking is not None and not self._looking.done():
            await asyncio.wait([self._looking])  # it may have read already what has changed since
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="looking at processes")
            # It may fail after its callers have gone.
            self._looking.add_done_callback(lambda looking: looking.cancelled() or looking.exception())
        return await asyncio.shield(self._looking)

    async def close(self) -> None:
        """Call it once no call of ``members`` is waiting."""
        if self._looking is not None:
            await cancel_all([self._looking], again_after_s=0.1)

    async def _look(self) -> list[RegisteredProcess]:
        found = await self._store.fleet.everyone()
        records: list[AnyRecord] = [*found.trainers, *found.workers, *found.engines]
        return [self._seen(record) for record in records]

    def _seen(self, record: AnyRecord) -> RegisteredProcess:
        is_gone = self._watch.stands_still((type(record), record.id), record.beats)
        return RegisteredProcess(record, not is_gone)
