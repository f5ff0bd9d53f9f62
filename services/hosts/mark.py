"""Marks which session holds the event loop of a host process, readable from outside while it hangs and after it died.

Rule: the mark is set exactly while code of a session runs on the loop, so that it names the session that made the
process hang or crash, and no other. Threads are not marked: several of them run at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

_LAYOUT = struct.Struct("<qd")
_NO_SESSION = -1
_Yielded = TypeVar("_Yielded", covariant=True)
_Sent = TypeVar("_Sent", contravariant=True)
_Result = TypeVar("_Result", covariant=True)
_Y = TypeVar("_Y")
_S = TypeVar("_S")
_T = TypeVar("_T")
SESSION: contextvars.ContextVar[int] = contextvars.ContextVar("session", default=_NO_SESSION)
"""The session that a task, and every task that it starts, runs for."""


@dataclass(frozen=True, slots=True)
class Holder:
    session: int
    held_s: float


class Mark:
    """A few bytes of memory that two processes share."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    @staticmethod
    def new() -> int:
        """The descriptor of a fresh mark, which can be passed to another process."""
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            file.write(_LAYOUT.pack(_NO_SESSION, 0.0))
            file.flush()
            return os.dup(file.fileno())

    def set(self, session: int) -> None:
        _LAYOUT.pack_into(self._memory, 0, session, time.monotonic())

    def clear(self) -> None:
        _LAYOUT.pack_into(self._memory, 0, _NO_SESSION, 0.0)

    def holder(self) -> Holder | None:
        session, since = _LAYOUT.unpack_from(self._memory, 0)
        return None if session == _NO_SESSION else Holder(session, max(0.0, time.monotonic() - since))

    def close(self) -> None:
        self._memory.close()


class _Marked(Coroutine[_Yielded, _Sent, _Result]):
    """A coroutine that sets the mark whenever it runs."""

    def __init__(self, inner: Coroutine[_Yielded, _Sent, _Result], mark: Mark, session: int) -> None:
        self._inner = inner
        self._mark = mark
        self._session = session

    def send(self, value: _Sent) -> _Yielded:
        self._mark.set(self._session)
        try:
            return self._inner.send(value)
        finally:
            self._mark.clear()

    def throw(self, *error: Any) -> _Yielded:
        self._mark.set(self._session)
        try:
            return self._inner.throw(*error)
        finally:
            self._mark.clear()

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[_Yielded, None, _Result]:
        return self._inner.__await__()


def mark_sessions(loop: asyncio.AbstractEventLoop, mark: Mark) -> None:
    """From now on every task of ``loop`` that runs for a session sets the mark while it runs."""

    def make_task(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[_Y, _S, _T] | Generator[Any, None, _T],
        *,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> asyncio.Task[_T]:
        session = SESSION.get() if context is None else context.get(SESSION, _NO_SESSION)
        if session != _NO_SESSION and isinstance(coroutine, Coroutine):
            coroutine = _Marked(coroutine, mark, session)
        return asyncio.Task(coroutine, loop=loop, context=context, **options)

    loop.set_task_factory(make_task)
