"""Coroutines that belong together: when one ends, however it ends, the others do. And a sleep that an event ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from services.process.cancelling import cancel_all

# What a cancelled coroutine may take to clean up before it is cancelled again.
CLEANING_UP_S = 2.0


async def first_to_end(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first one returns or raises; its result counts, the others are cancelled and awaited."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
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
