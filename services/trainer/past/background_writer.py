"""Runs work alongside the next training step: writing and publishing weights, saving a checkpoint.

Rule: one piece of work at a time, in order, and no error is lost: the step loop gets it at its next check or wait.
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
        """Wait for the previous work, then start ``work``."""
        try:
            await self.finish()
        except BaseException:
            work.close()
            raise
        self._task = asyncio.create_task(work)

    async def finish(self) -> None:
        """Wait for the current work and raise its error, if any."""
        if self._task is not None:
            await self._task
            self._task = None

    def check(self) -> None:
        """Raise the error of finished work, if any, without waiting."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def succeeded(self) -> None:
        """Wait for the current work beside the step loop, and raise its error, if any, which stays for that loop."""
        if (task := self._task) is not None:
            await asyncio.wait({task})
            task.result()

    async def end(self) -> None:
        """Cancel the current work; a write interrupted in a thread leaves nothing that looks complete."""
        if self._task is not None:
            await cancel_all([self._task])
        self._task = None
