"""Coroutines that end together, however the first one ends; and what an event ends: a sleep, or any work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from services.process.cancelling import cancel_all

T = TypeVar("T")

# Time to clean up after a cancellation, before the next one.
CLEANING_UP_S = 2.0


async def first_to_end(*coroutines: Awaitable[None]) -> None:
    """Run all until the first one returns or raises; its result counts, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        await cancel_all(tasks, again_after_s=CLEANING_UP_S)


async def sleep_unless(event: asyncio.Event, seconds: float) -> None:
    """Return after ``seconds``, or at once when ``event`` is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


async def unless_set(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` returns; None where ``event`` is set before: then it is cancelled."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_all([working, waiting], again_after_s=CLEANING_UP_S)
