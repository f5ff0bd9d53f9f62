"""Registers engines for as long as they answer; an engine itself does not know Redis.

Rule: only an engine that has just answered is registered, whether or not it serves a job; a silent one gets no beat, so
watchers of the beats see that it is gone. Several processes may beat for one engine. The caller supplies the way to
query an engine; nothing here binds or routes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from services.state.client import Away
from services.state.fleet_records import DescribedEngine, EngineRecord

# A beat is a tenth of the lease, so an engine that is loading weights may miss some.
BEATS_PER_LEASE = 10
# Deadline for an engine's answer; a slower engine gets no beat.
ANSWER_S = 2.0

Ask = Callable[[], Awaitable[DescribedEngine | None]]
"""Returns the engine's description, or None if it does not answer within ``ANSWER_S``."""


class EngineRegister(Protocol):
    """The part of the fleet used here."""

    async def register_engine(self, record: EngineRecord) -> None: ...


class EngineBeats:
    """Call ``run`` beside the process's other work."""

    def __init__(self, fleet: EngineRegister, engines: Mapping[str, Ask], *, lease_s: float) -> None:
        """``engines`` maps addresses to queries."""
        self._fleet = fleet
        self._engines = engines
        self._beat_s = lease_s / BEATS_PER_LEASE

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await asyncio.gather(*(self.beat(url) for url in self._engines))
            await asyncio.sleep(self._beat_s)

    async def beat(self, url: str) -> None:
        """Register the engine if it answers."""
        said = await self._engines[url]()
        if said is not None:
            with contextlib.suppress(Away):
                await self._fleet.register_engine(EngineRecord.of(url, said))
