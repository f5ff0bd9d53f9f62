"""Quarantine of an environment: after nothing but failures for a while, only a few attempts try it.

Rule: a failure that never passes (images) begins it at once, and lasts: whatever acts so that it is shown one would
drop out, and what does not would be trained. During quarantine no episode
is charged for its failures; they wait, and the first attempt that reaches its end releases them all. It is reported
once that the environment is ill, with the last error, and once that it is well again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from gspo_core.environment_contract import IMAGES, EnvironmentFailed
from services.episodes.policy import Drained
from services.hosts.session import SessionLost

# Failed attempts in a row, over all episodes, before quarantine begins.
MOST_FAILURES = 16
# One that took so long (a reset that hangs until its deadline) counts as so many: sixteen of them are minutes.
SLOW_S, SLOW_COUNT = 10.0, 4
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
# How often a waiting attempt checks whether the worker is leaving.
LOOK_S = 0.2

Tell = Callable[[bool, str], Awaitable[None]]
"""Whether it is well, and the last error."""


async def tell_nobody(is_well: bool, error: str) -> None:
    pass


class Quarantine:
    """Watches one environment of one job, at one worker."""

    def __init__(self, tell: Tell = tell_nobody, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._tell = tell
        self._first_pause_s = self._pause_s = first_pause_s
        self._num_failures = 0
        self._is_final = False
        """Its failure never passes."""
        self._next_try = 0.0
        self.error: str | None = None
        """The last failure, while it is in quarantine."""
        self.num_waiting = 0
        self._door = asyncio.Lock()
        """Only the first in line looks; the others wait for its place, at no cost, however many they are."""

    @property
    def is_on(self) -> bool:
        return self.error is not None

    @contextlib.asynccontextmanager
    async def entry(self, leaving: asyncio.Event) -> AsyncIterator[None]:
        """Surrounds an attempt. Waits for its turn; raises ``Drained`` if the worker leaves meanwhile."""
        is_try = await self._wait(leaving)
        began = asyncio.get_running_loop().time()
        try:
            yield
        except SessionLost:
            raise  # its whole process died: that says nothing about the environment
        except EnvironmentFailed as failure:
            is_slow = asyncio.get_running_loop().time() - began >= SLOW_S
            count = SLOW_COUNT if is_slow else 1
            await self._failed(str(failure), count, is_final=failure.phase == IMAGES, is_try=is_try)
            raise
        await self._succeeded()

    async def _wait(self, leaving: asyncio.Event) -> bool:
        """Whether it is one of the few that try the environment during quarantine."""
        self.num_waiting += 1
        try:
            async with self._door:
                while self.is_on:
                    now = asyncio.get_running_loop().time()
                    if now >= self._next_try:
                        self._next_try = now + self._pause_s
                        return True
                    if leaving.is_set():
                        raise Drained("its environment is failing and the worker is leaving")
                    await asyncio.sleep(min(LOOK_S, self._next_try - now))
                return False
        finally:
            self.num_waiting -= 1

    async def _failed(self, error: str, count: int, *, is_final: bool, is_try: bool) -> None:
        """Those that were under way when quarantine began (``is_try`` is false) fail together, and say nothing new."""
        self._num_failures += count
        if self._is_final:
            return
        self._is_final = is_final
        if self.is_on and not is_final:
            if is_try:
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self.error = error
        elif is_final or self._num_failures >= MOST_FAILURES:
            self.error = error
            self._next_try = asyncio.get_running_loop().time() + self._pause_s
            await self._tell(False, error)

    async def _succeeded(self) -> None:
        if self._is_final:
            return
        self._num_failures, self._pause_s = 0, self._first_pause_s
        if self.error is not None:
            error, self.error = self.error, None
            await self._tell(True, error)
