"""An engine that is about to leave gives up its work first: it gets no more, and its job gives it back.

Rule: it stays listed until no job holds it, or until there is no more time. What was asked before runs to its end.
Nothing here speaks to an engine, or ends one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from services.process.telemetry import get_logger
from services.state.fleet_records import EngineRecord

_POLL_S = 0.1


class LeavableEngines(Protocol):
    """The part of the fleet used here."""

    async def engines(self) -> list[EngineRecord]: ...

    async def drain_engine(self, engine_id: str, wanted: bool = True) -> None: ...


async def drain(fleet: LeavableEngines, engines: Sequence[str], within_s: float) -> list[str]:
    """Those that a job holds still when the time is up. Let their beats go on meanwhile."""
    for engine in engines:
        await fleet.drain_engine(engine)
    held = list(engines)
    try:
        async with asyncio.timeout(within_s):
            while held := [one.id for one in await fleet.engines() if one.id in engines and one.job]:
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        get_logger().warning("engines leave although jobs hold them", engines=held, waited_s=within_s)
    return held
