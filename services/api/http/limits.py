"""How often one caller may ask: a bucket of tokens for each credential.

One rule: a caller that asks too often is told when to come back, and takes nothing from others. Each process counts for
itself, so several API processes multiply the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

# A viewer sends a few dozen requests at once and then rests; a runaway loop sends thousands.
REQUESTS_PER_S = 100.0
BURST = 400.0


class RateLimit:
    def __init__(self, clock: Callable[[], float], *, per_s: float = REQUESTS_PER_S, burst: float = BURST) -> None:
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        # One entry for each valid key: their number is bounded by whoever issues keys.
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, name: str) -> int:
        """0: go ahead; else in how many seconds it may ask again."""
        now = self._clock()
        level, since = self._buckets.get(name, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._per_s)
        allowed = level >= 1.0
        self._buckets[name] = (level - 1.0 if allowed else level, now)
        return 0 if allowed else max(1, math.ceil((1.0 - level) / self._per_s))
