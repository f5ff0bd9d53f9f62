"""How often one caller may ask: a bucket of requests for each, which all API processes take from.

Rule: a caller that asks too often is told when to come back, and takes nothing from others. A process takes requests
in handfuls, so that most cost no round trip and none more than one; while Redis is away it counts for itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from services.process.telemetry import get_logger
from services.state.client import Away, RedisFault
from services.state.functions import Functions
from services.state.keys import service_keys
from services.state.refusals import Damaged

# A viewer sends a few dozen requests at once and then rests; a runaway loop sends thousands.
REQUESTS_PER_S = 100.0
BURST = 400.0
HANDFUL = 20
# What is not used by then is lost, so that a process which has nothing to do keeps nothing from the others.
KEPT_S = 1.0
# No request waits longer for a Redis that does not answer, and most do not at all.
PATIENCE_S = 0.5
AWAY_S = 5.0


class RateLimit:
    """Counts for this process alone."""

    def __init__(self, clock: Callable[[], float], *, per_s: float = REQUESTS_PER_S, burst: float = BURST) -> None:
        self.clock = clock
        self.per_s = per_s
        self.burst = burst
        # One entry for each valid key: the issuer of keys bounds their number.
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, name: str) -> int:
        """0: go ahead; else in how many seconds it may ask again."""
        now = self.clock()
        level, since = self._buckets.get(name, (self.burst, now))
        level = min(self.burst, level + (now - since) * self.per_s)
        allowed = level >= 1.0
        self._buckets[name] = (level - 1.0 if allowed else level, now)
        return 0 if allowed else max(1, math.ceil((1.0 - level) / self.per_s))


class SharedRateLimit:
    """Counts for all processes on one Redis; ``now`` is roughly equal on all of them."""

    def __init__(self, own: RateLimit, now: Callable[[], float] = time.time, *, handful: int = HANDFUL) -> None:
        self._own = own
        self._now = now
        self._handful = handful
        self._taken: dict[str, tuple[int, float]] = {}
        # Among concurrent requests, one takes the handful that serves them all.
        self._taking: dict[str, asyncio.Lock] = {}
        self._away_until = -math.inf

    async def wait_s(self, name: str, functions: Functions) -> int:
        """0: go ahead; else in how many seconds it may ask again."""
        if self._had_one(name):
            return 0
        async with self._taking.setdefault(name, asyncio.Lock()):
            return 0 if self._had_one(name) else await self._take_more(name, functions)

    def _had_one(self, name: str) -> bool:
        left, until = self._taken.get(name, (0, 0.0))
        if left and self._own.clock() < until:
            self._taken[name] = left - 1, until
            return True
        return False

    async def _take_more(self, name: str, functions: Functions) -> int:
        now = self._own.clock()
        if now < self._away_until:
            return self._own.wait_s(name)
        try:
            async with asyncio.timeout(PATIENCE_S):
                granted, wait_ms = await self._take(name, functions)
        except (Away, RedisFault, Damaged, TimeoutError) as error:
            get_logger().warning("callers are counted by each API process for itself", error=f"{error!r}")
            self._away_until = now + AWAY_S
            return self._own.wait_s(name)
        self._taken[name] = max(0, granted - 1), now + KEPT_S
        return 0 if granted else max(1, math.ceil(wait_ms / 1000))

    async def _take(self, name: str, functions: Functions) -> tuple[int, int]:
        said = (int(self._now() * 1000), self._own.per_s, self._own.burst, self._handful)
        granted, wait_ms = await functions.call("take_requests", service_keys(), name, *said)
        return int(granted), int(wait_ms)
