"""A full disk is one exception, ``NoRoom``, and a write can wait until there is room.

The rule: any other failure is raised at once. A write that is retried must leave nothing behind when it fails, which
holds for every write-once file of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from services.files.durable import temporary_name, write_flushed
from services.process.telemetry import get_logger

P = ParamSpec("P")
T = TypeVar("T")
RETRY_S = 2.0
# Two or three records of a job, in blocks of a file system.
_SMALL_RECORD = 16 * 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(Exception):
    """The disk is full: the same write succeeds once there is room."""


def lacks_room(error: BaseException) -> bool:
    """Whether ``error`` says that the disk is full. Safetensors says so only in its message."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    return says_no_room(str(error))


def says_no_room(text: str) -> bool:
    """Whether an error told in ``text``, by Python or by safetensors, is that of a full disk."""
    return any(f"[Errno {number}]" in text or f"os error {number}" in text for number in _NO_ROOM)


def require_room(directory: Path) -> None:
    """Raises OSError where a small record would not fit into ``directory``, before anything else is changed for it."""
    probe = directory / temporary_name()
    try:
        write_flushed(probe, bytes(_SMALL_RECORD))
    finally:
        probe.unlink(missing_ok=True)


@contextlib.contextmanager
def raising_no_room() -> Iterator[None]:
    """Raises NoRoom in place of any error that means a full disk."""
    try:
        yield
    except NoRoom:
        raise
    except Exception as error:
        if lacks_room(error):
            raise NoRoom(str(error)) from error
        raise


async def write_when_there_is_room(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """``asyncio.to_thread`` for a caller that would rather wait than fail."""
    is_told = False
    while True:
        try:
            with raising_no_room():
                return await asyncio.to_thread(function, *args, **kwargs)
        except NoRoom as error:
            if not is_told:
                get_logger().warning("disk full: retrying until there is room", error=str(error))
            is_told = True
        await asyncio.sleep(RETRY_S)
