"""Writing where the disk may be full: told, tried again until there is room. Any other failure rises at once.

What is tried again must leave nothing behind when it fails, which every write-once file of a job keeps.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

from services.telemetry import get_logger

T = TypeVar("T")
RETRY_S = 2.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def lacks_room(error: BaseException) -> bool:
    """Whether ``error`` says that the disk is full. Safetensors tells it in the text alone."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return any(f"os error {number}" in str(error) for number in _NO_ROOM)


async def write_when_there_is_room(function: Callable[..., T], *args: object) -> T:
    """``asyncio.to_thread`` for who rather waits than fails."""
    is_told = False
    while True:
        try:
            return await asyncio.to_thread(function, *args)
        except Exception as error:
            if not lacks_room(error):
                raise
            if not is_told:
                get_logger().warning("disk full: tried again until there is room", error=str(error))
            is_told = True
        await asyncio.sleep(RETRY_S)
