"""Coroutines that end together, however the first one ends; and a sleep that an event ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from services.process.cancelling import cancel_all

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
