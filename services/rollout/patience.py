"""How a worker waits for what is away for a while: Redis restarting, an engine loading, a network that blinks.

Rule: only what says "not reachable" or "not now" is tried again; an answer, also a refusal, is never asked for twice.
The wait doubles up to a bound and carries jitter, so that a thousand episodes do not come back in one instant.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from redis.exceptions import ClusterDownError, OutOfMemoryError, ReadOnlyError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.rollout.counters import Counters
from services.telemetry import get_logger

P = ParamSpec("P")
T = TypeVar("T")

UNREACHABLE = (RedisConnectionError, RedisTimeoutError, ConnectionError, TimeoutError)
# What a server says that takes no writes for a while: its memory or its disk is full, it is a replica now, or busy.
_NOT_NOW = (OutOfMemoryError, ReadOnlyError, TryAgainError, ClusterDownError)
_NOT_NOW_WORDS = ("MISCONF", "NOREPLICAS", "BUSY ")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds between attempts: ``first_s`` doubled every time, at most ``max_s``, with up to half of it off."""

    first_s: float = 0.05
    max_s: float = 2.0

    def wait_s(self, attempt: int, random_share: float) -> float:
        return float(min(self.max_s, self.first_s * 2 ** min(attempt, 16))) * (1 - random_share / 2)


class Patience:
    """Tries again for as long as it takes; who waits is cancelled from outside."""

    def __init__(self, counters: Counters, rng: random.Random, backoff: Backoff | None = None) -> None:
        self._counters = counters
        self._rng = rng
        self._backoff = backoff or Backoff()

    async def keep_trying(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer of ``call``, which must be harmless to repeat, once there is one."""
        attempt = 0
        while True:
            try:
                return await _cancellable(call(*args, **kwargs))
            except UNREACHABLE:
                self._counters.add("redis/retries")
            except ResponseError as error:
                self._bear(error, attempt)
            await self.pause(attempt)
            attempt += 1

    async def try_once(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The answer of ``call``, or None when there is none now: for what is asked again soon anyway."""
        try:
            return await _cancellable(call(*args, **kwargs))
        except UNREACHABLE:
            self._counters.add("redis/retries")
        except ResponseError as error:
            self._bear(error, 1)
        return None

    def _bear(self, error: ResponseError, attempt: int) -> None:
        """Raises what is no "not now"."""
        if not (isinstance(error, _NOT_NOW) or str(error).startswith(_NOT_NOW_WORDS)):
            raise error
        self._counters.add("redis/not_now")
        if not attempt:
            get_logger().warning("Redis takes no writes: waiting", error=str(error))

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
