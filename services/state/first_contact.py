"""What a process asks of Redis before it can begin.

Rule: a Redis that is away is waited for, since all processes of an installation may start together, and in any order;
who is asked to leave meanwhile leaves at once, as there is nothing that it holds. Any other refusal rises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from services.process.cancelling import sleep_unless, unless_set
from services.process.telemetry import get_logger
from services.state.away import Away

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
