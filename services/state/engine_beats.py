"""Registers engines for as long as they answer: an engine itself knows nothing of Redis.

Rule: only an engine that answered just now is registered, whether it serves a job or not; a silent one gets no beat,
and whoever watches the beats finds it gone. Several processes may beat for one engine. How an engine is asked is
given; nothing is bound or routed here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from services.state.away import Away
from services.state.fleet_records import Described, EngineRecord

# A beat is a tenth of the lease: an engine that loads weights may miss some.
BEATS_PER_LEASE = 10
# For how long an engine may take to answer; one that takes longer gets no beat.
ANSWER_S = 2.0

Ask = Callable[[], Awaitable[Described | None]]
"""What the engine says of itself, or None when it does not answer within ``ANSWER_S``."""


class EngineRegister(Protocol):
    """What is used of the fleet."""

    async def register_engine(self, record: EngineRecord) -> None: ...


class EngineBeats:
    """``run`` beside whatever else the process does."""

    def __init__(self, fleet: EngineRegister, engines: Mapping[str, Ask], *, lease_s: float) -> None:
        """``engines`` by address."""
        self._fleet = fleet
        self._engines = engines
        self._beat_s = lease_s / BEATS_PER_LEASE

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.gather(*(self.beat(url) for url in self._engines))
            await asyncio.sleep(self._beat_s)

    async def beat(self, url: str) -> None:
        """Registers the engine if it answers."""
        said = await self._engines[url]()
        if said is not None:
            with contextlib.suppress(Away):
                await self._fleet.register_engine(EngineRecord.of(url, said))
