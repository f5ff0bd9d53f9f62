"""One sending to several engines: it begins when all of them are paused, and each learns what became of it there.

Rule: the others do not wait long for an absent engine, and a late one is told so: nothing was sent to it, and its old
weights serve on. How weights are sent, and what a failure means, is the transport's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from services.engines.protocol import Engine, EngineError, EngineRejected

# Paused engines wait for the last one to pause. More than a step of a busy engine takes.
_GATHER_S = 5.0

Send = Callable[[Sequence[Engine], Mapping[str, bool]], Awaitable[Mapping[str, EngineError]]]
"""Takes the engines, and for each whether to flush its cache; returns what failed, by engine."""


class JointSending:
    """Each engine calls ``take`` when it is paused, or ``withdraw`` is called for it."""

    def __init__(self, engines: Sequence[Engine], send: Send) -> None:
        self._send = send
        self._expected = {engine.url for engine in engines}
        self._there: dict[str, Engine] = {}
        self._flushes: dict[str, bool] = {}
        self._all_there = asyncio.Event()
        self._sending: asyncio.Task[Mapping[str, EngineError]] | None = None
        self._num_waiting = 0

    @property
    def is_under_way(self) -> bool:
        return self._sending is not None and not self._sending.done()

    async def take(self, engine: Engine, *, flush: bool) -> None:
        """Returns when the engine has the weights; raises what failed there."""
        if engine.url not in self._expected:
            raise EngineRejected(f"{engine.url}: it was paused too late for this sending, and nothing was sent to it")
        self._expected.discard(engine.url)
        self._there[engine.url], self._flushes[engine.url] = engine, flush
        self._begin_if_all_there()
        if self._sending is None:
            self._sending = asyncio.create_task(self._when_all_there(), name="sending weights")
        self._num_waiting += 1
        try:
            failed = await asyncio.shield(self._sending)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:  # all were cancelled
                self._sending.cancel()
        if engine.url in failed:
            raise failed[engine.url]

    def withdraw(self, url: str) -> None:
        """This engine does not come."""
        self._expected.discard(url)
        self._begin_if_all_there()

    def _begin_if_all_there(self) -> None:
        if not self._expected:
            self._all_there.set()

    async def _when_all_there(self) -> Mapping[str, EngineError]:
        try:
            async with asyncio.timeout(_GATHER_S):
                await self._all_there.wait()
        except TimeoutError:
            self._expected.clear()
        return await self._send(list(self._there.values()), self._flushes)
