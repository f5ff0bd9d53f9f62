"""Cancelling tasks for certain: once is not enough.

Before Python 3.12 the Redis client may swallow a cancellation: `asyncio.wait_for`, which it writes through, drops one
that arrives just as it finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


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
