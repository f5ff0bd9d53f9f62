"""Engines know no Redis: whoever is given their addresses says for them that they live, for as long as they answer.

Rule: only an engine that answered just now is registered, whether it serves a job or not; one that is silent gets no
beat, and who watches the beats finds it gone. Several processes may beat for one engine. It binds and routes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Any, Protocol

from services.away import Away
from services.engine_client import EngineClient, EngineError

# A beat is a tenth of the lease: an engine that loads weights may miss some.
BEATS_PER_LEASE = 10
_ANSWER_S = 2.0
# What a person or a scheduler wants to know of an engine; keys and paths of the server stay out.
_SHOWN = ("model_path", "weight_version", "model_type", "architectures")


class Registry(Protocol):
    """What is used of the store."""

    async def register_engine(self, record: dict[str, Any]) -> None: ...


class EngineBeats:
    """``run`` beside whatever else the process does."""

    def __init__(self, store: Registry, engines: Collection[EngineClient], *, lease_s: float) -> None:
        self._store = store
        self._engines = engines
        self._beat_s = lease_s / BEATS_PER_LEASE

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.gather(*(self.beat(engine) for engine in self._engines))
            await asyncio.sleep(self._beat_s)

    async def beat(self, engine: EngineClient) -> None:
        """Registers ``engine`` if it answers."""
        with contextlib.suppress(EngineError, TimeoutError, Away):
            async with asyncio.timeout(_ANSWER_S):
                info = await engine.model_info()
            await self._store.register_engine(engine_record(engine.url, info))


def engine_record(url: str, info: dict[str, Any]) -> dict[str, Any]:
    """What Redis holds of an engine: its name is its address."""
    return {"id": url, "url": url, **{name: info.get(name) for name in _SHOWN}}
