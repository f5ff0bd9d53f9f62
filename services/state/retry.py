"""Waits for a Redis that is away, before a process begins and at every call, and tries again.

Rule: only ``Away`` is retried. Any other answer, a refusal included, is final. The wait of a call doubles up to a bound
and carries jitter, so that a thousand episodes do not come back at the same instant. All processes of an installation
may start together, and in any order; a process that is asked to leave before its first contact leaves at once, as it
holds nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from services.process.cancelling import sleep_unless, unless_set
from services.process.telemetry import get_logger
from services.state.client import Away

P = ParamSpec("P")
T = TypeVar("T")

AGAIN_S = 1.0


async def first_contact(stop: asyncio.Event, ask: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """What ``ask`` returns, which may be asked again and again; None where ``stop`` was set before."""
    is_told = False
    while not stop.is_set():
        try:
            return await unless_set(stop, ask())
        except Away as error:
            if not is_told:
                get_logger().warning("waiting for Redis before anything begins", error=str(error))
            is_told = True
        await sleep_unless(stop, AGAIN_S)
    return None


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between attempts: ``first_s`` doubled every time, at most ``max_s``, with up to half of it off."""

    first_s: float = 0.05
    max_s: float = 2.0

    def wait_s(self, attempt: int, random_share: float) -> float:
        return float(min(self.max_s, self.first_s * 2 ** min(attempt, 16))) * (1 - random_share / 2)


class RetryCounts(Protocol):
    """Where each failed attempt is counted, by its cause."""

    def add(self, name: str) -> None: ...


class Retrier:
    """Tries again for as long as it takes; a caller that should not wait is cancelled from outside."""

    def __init__(self, counters: RetryCounts, rng: random.Random, backoff: Backoff | None = None) -> None:
        self._counters = counters
        self._rng = rng
        self._backoff = backoff or Backoff()

    async def keep_trying(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer of ``call``, once there is one; ``call`` must be harmless to repeat."""
        attempt = 0
        while True:
            try:
                return await _cancellable(call(*args, **kwargs))
            except Away as error:
                self._note(error, is_first=not attempt)
            await self.pause(attempt)
            attempt += 1

    async def try_once(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The answer of ``call``, or None when there is none now: for a question that is soon asked again anyway."""
        try:
            return await _cancellable(call(*args, **kwargs))
        except Away as error:
            self._note(error, is_first=False)
        return None

    def _note(self, error: Away, *, is_first: bool) -> None:
        self._counters.add("redis/not_now" if error.has_answered else "redis/retries")
        if error.has_answered and is_first:
            get_logger().warning("Redis is refusing commands: waiting", error=str(error))

    async def pause(self, attempt: int) -> None:
        await asyncio.sleep(self._backoff.wait_s(attempt, self._rng.random()))


async def _cancellable(answer: Awaitable[T]) -> T:
    """Raises the cancellation that ``answer`` swallowed, if it did.

    The Redis client sends through ``asyncio.wait_for``, which before Python 3.12 forgets a cancellation that comes in
    the instant in which the sending is done. A loop that asks again and again would then never end.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    try:
        return await answer
    finally:
        if task.cancelling() > num_cancels:
            raise asyncio.CancelledError
