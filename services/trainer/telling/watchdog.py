"""Watches a run for progress: reports when nothing moves, and ends the attempt when that lasts.

Rule: only movement counts, not its amount; an attempt is not ended if the next one would be just as stuck. The caller
defines movement through ``signs``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable

from gspo_core.stop_spec import WatchdogSpec
from services.trainer.telling.failure import AttemptFailed

POLL_S = 1.0


class Watchdog:
    """``signs`` changes with every movement; None while no movement is expected."""

    def __init__(
        self,
        signs: Callable[[], Hashable | None],
        bounds: Callable[[], WatchdogSpec],
        alarm: Callable[[str], Awaitable[None]],
        excuse: Callable[[], Awaitable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
    ) -> None:
        self._signs = signs
        self._bounds = bounds
        self._alarm = alarm
        self._excuse = excuse
        """Why another attempt would be just as stuck; empty if there is no such reason."""
        self._clock = clock
        self._poll_s = poll_s

    async def run(self) -> None:
        """Watch until cancelled. Raises AttemptFailed."""
        seen, since, has_warned = self._signs(), self._clock(), False
        while True:
            await asyncio.sleep(self._poll_s)
            signs = self._signs()
            if signs is None or signs != seen:
                seen, since, has_warned = signs, self._clock(), False
                continue
            bounds, idle_s = self._bounds(), self._clock() - since
            if bounds.end_s is not None and idle_s >= bounds.end_s and not await self._excuse():
                raise AttemptFailed("no_progress", _stillness(idle_s))
            if bounds.alarm_s is not None and idle_s >= bounds.alarm_s and not has_warned:
                has_warned = True
                await self._alarm(await self._warning(idle_s))

    async def _warning(self, idle_s: float) -> str:
        excuse = await self._excuse()
        return _stillness(idle_s) + (f": {excuse}" if excuse else "")


def _stillness(idle_s: float) -> str:
    return f"no step finished and no segment of an episode arrived for {idle_s:.0f} s"
