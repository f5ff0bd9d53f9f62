"""Ends tasks for certain: all that are cancelled, those beside the first to end, and what an event cuts short.

Once is not enough: before Python 3.12 the Redis client may swallow a cancellation, since `asyncio.wait_for`, which it
writes through, drops one that arrives just as it finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Time to clean up after a cancellation, before the next one.
CLEANING_UP_S = 2.0


async def cancel_all(tasks: Collection[asyncio.Task[Any]], *, again_after_s: float = 2.0) -> None:
    """Cancel until all are over, and ignore what they raise. ``again_after_s``: the time to clean up.

    A cancellation of the caller takes effect afterwards, else a task that swallowed its own would live on.
    """
    was_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        was_cancelled |= await _given_time(pending, again_after_s)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    if was_cancelled:
        raise asyncio.CancelledError


async def _given_time(tasks: Collection[asyncio.Task[Any]], seconds: float) -> bool:
    """Until all are over or the time has passed; whether the caller was cancelled meanwhile, which cuts nothing short:
    a task that is cancelled in the middle of its cleaning up leaves it undone."""
    clock = asyncio.get_running_loop().time
    end, was_cancelled = clock() + seconds, False
    while (left := end - clock()) > 0 and not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks, timeout=left)
        except asyncio.CancelledError:
            was_cancelled = True
    return was_cancelled


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
