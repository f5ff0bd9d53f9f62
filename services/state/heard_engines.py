"""What a process that does not look at the engines can rely on, because another one has just looked.

Rule: an engine counts as seen only while new looks at it keep arriving; if no process looks, or it did not answer, the
caller asks it. While Redis is away, that is the same. Nothing here speaks to an engine.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from services.state.client import Away
from services.state.engine_beats import Ask
from services.state.engine_sightings import WATCH_LEASE_S, Sighting
from services.state.fleet_records import DescribedEngine

# Engines are looked at once a second; longer than it takes to tell of that on a busy machine.
FRESH_S = 1.5 * WATCH_LEASE_S
# Several questions at the same instant are one reading.
_READ_S = 0.2


class ReadSightings(Protocol):
    async def all(self) -> dict[str, Sighting]: ...


class HeardEngines:
    def __init__(self, sightings: ReadSightings, clock: Callable[[], float]) -> None:
        self._sightings = sightings
        self._clock = clock
        self._seen: dict[str, Sighting] = {}
        self._told_at: dict[str, float] = {}
        self._read_at = -math.inf

    async def label(self, url: str) -> str | None:
        """What the engine called its weights when it was looked at just now; None: it has to be asked."""
        now = self._clock()
        if now - self._read_at > _READ_S:
            await self._read(now)
        seen = self._seen.get(url)
        if seen is None or not seen.answered or now - self._told_at.get(url, -math.inf) > FRESH_S:
            return None
        return seen.label

    async def _read(self, now: float) -> None:
        is_first = self._read_at == -math.inf
        self._read_at = now
        try:
            seen = await self._sightings.all()
        except Away:
            return
        for url, one in seen.items():
            before = self._seen.get(url)
            # The age of the first sighting read here is unknown.
            if not is_first and (before is None or before.number != one.number):
                self._told_at[url] = now
        self._seen = seen


def seldom_asked(engines: Mapping[str, Ask], heard: HeardEngines) -> dict[str, Ask]:
    """The same questions, and the last answer again for as long as the engine is seen to hold the same weights."""

    def of(url: str, ask: Ask) -> Callable[[], Awaitable[DescribedEngine | None]]:
        last: DescribedEngine | None = None

        async def answer() -> DescribedEngine | None:
            nonlocal last
            if last is None or not last.label or await heard.label(url) != last.label:
                last = await ask()
            return last

        return answer

    return {url: of(url, ask) for url, ask in engines.items()}
