"""Ends tasks for certain: once is not enough.

Before Python 3.12 the Redis client may swallow a cancellation: `asyncio.wait_for`, which it writes through, forgets one
that comes when it has just finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


async def cancel_all(tasks: Collection[asyncio.Task[Any]], *, again_after_s: float = 2.0) -> None:
    """Cancels until all are over; what they raise is of no interest. ``again_after_s``: what one may take to clean up.

    Who cancels the caller meanwhile waits too, else a task that swallowed its cancellation would live on.
    """
    was_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=again_after_s)
        except asyncio.CancelledError:
            was_cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as never retrieved
    if was_cancelled:
        raise asyncio.CancelledError
