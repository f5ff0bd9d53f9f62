"""Writes to a disk that may be full: reports it once and retries until there is room, so a full disk never ends a job.

Rule: it waits only for room; any other failure propagates. A retried write must leave nothing behind when it fails,
which holds for every write-once file of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.files.disk_space import NoRoom, raising_no_room
from services.process.telemetry import get_logger
from services.trainer.telling.failure import AlertKind

T = TypeVar("T")
RETRY_S = 2.0

Tell = Callable[[AlertKind, str], Awaitable[None]]
"""Takes a kind (``disk_full``, ``disk_has_room``) and a message."""


class DiskWaits:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    async def wait_for_room(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of ``attempt``, retried while the disk is full."""
        is_told = False
        while True:
            try:
                with raising_no_room():
                    result = await attempt()
            except NoRoom as error:
                if not is_told:
                    message = f"no disk space for {what}; the job continues once there is ({error})"
                    get_logger().warning("disk full", what=what, error=str(error))
                    await self._say("disk_full", message)
                is_told = True
                await asyncio.sleep(RETRY_S)
            else:
                if is_told:
                    await self._say("disk_has_room", f"{what} was written")
                return result

    async def write(self, what: str, function: Callable[..., T], *args: object) -> T:
        """Like ``wait_for_room``, for a blocking function in a thread."""
        return await self.wait_for_room(what, lambda: asyncio.to_thread(function, *args))

    async def _say(self, kind: AlertKind, message: str) -> None:
        with contextlib.suppress(OSError):  # reporting may need the same disk
            await self._tell(kind, message)
