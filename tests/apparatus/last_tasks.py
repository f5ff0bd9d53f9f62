"""Tasks that a test leaves to the end of its event loop end there, also those that swallow a cancellation.

asyncio cancels them once and then waits for ever, and before Python 3.12 the Redis client may swallow that once
(`services.process.cancelling`). A test that hangs for it is ended a quarter of an hour later, with no word of why.
"""

from __future__ import annotations

import asyncio
import asyncio.runners

from services.process.cancelling import cancel_all

AGAIN_AFTER_S = 1.0


def end_them_for_certain() -> None:
    asyncio.runners._cancel_all_tasks = _end_all  # type: ignore[attr-defined]


def _end_all(loop: asyncio.AbstractEventLoop) -> None:
    if not (tasks := asyncio.all_tasks(loop)):
        return
    loop.run_until_complete(cancel_all(tasks, again_after_s=AGAIN_AFTER_S))
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler({"message": "left running by a test", "exception": error, "task": task})
