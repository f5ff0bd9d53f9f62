"""Coroutines that belong together: when one ends, however it ends, the others do."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

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
        await _end(tasks)


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels until all are over: before Python 3.12 the Redis client may swallow a cancellation.

    Who cancels the caller meanwhile waits too, else a task that swallowed its cancellation would live on.
    """
    was_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CLEANING_UP_S)
        except asyncio.CancelledError:
            was_cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as never retrieved
    if was_cancelled:
        raise asyncio.CancelledError
