"""Work that goes on while the next step is trained: writing and publishing weights, saving a checkpoint.

The rule kept here: one piece at a time and in order, and no error is lost: what goes wrong rises in the step loop when
it looks or waits the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from services.process.cancelling import cancel_all


class BackgroundWriter:
    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin ``work`` once what was begun before is done."""
        try:
            await self.finish()
        except BaseException:
            work.close()
            raise
        self._task = asyncio.create_task(work)

    async def finish(self) -> None:
        """Until what was begun is done; raises what it raised."""
        if self._task is not None:
            await self._task
            self._task = None

    def check(self) -> None:
        """Raises what has gone wrong so far."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def end(self) -> None:
        """Give up what is under way; writing that a thread has begun leaves nothing behind that looks whole."""
        if self._task is not None:
            await cancel_all([self._task])
        self._task = None
