"""Asks processes to leave. A rollout worker stops taking episodes, hands back those it holds, and exits; a trainer
finishes and saves its current step, hands its job back, and exits.

The rule: a request names one process by its never reused id and stays until that process has seen it, so asking twice
equals asking once.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from services.state.away import Away
from services.state.client import RedisClient
from services.state.keys import service_key

LOOK_S = 2.0
_WISHES = service_key("drains")


class Drains:
    def __init__(self, redis: RedisClient) -> None:
        # Replies are bytes; the client's types allow for more.
        self._redis: Any = redis

    async def ask(self, process: str) -> None:
        await self._redis.hset(_WISHES, process, 1)

    async def is_asked(self, process: str) -> bool:
        return bool(await self._redis.hexists(_WISHES, process))

    async def all_asked(self) -> set[str]:
        """Processes that have not seen their request yet."""
        return {process.decode() for process in await self._redis.hkeys(_WISHES)}

    async def wait(self, process: str, stop: asyncio.Event) -> None:
        """Set ``stop`` when the process is asked to leave. No request can arrive while Redis is away."""
        while True:
            with contextlib.suppress(Away):
                if await self.is_asked(process):
                    break
            await asyncio.sleep(LOOK_S)
        stop.set()
        with contextlib.suppress(Away):
            await self._redis.hdel(_WISHES, process)
