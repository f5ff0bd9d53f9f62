"""Runs the members of a user's class: async ones on the event loop, sync ones in the session's own thread.

Rule: nothing that a user wrote blocks the loop, and every call has a deadline. A sync call that overruns cannot be
killed inside a process: its thread is left behind as a daemon and the session that owns it is lost.
One thread per session, because objects like a sqlite3 connection may only be used by the thread that made them.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
T = TypeVar("T")

# An async member that is cancelled gets so long to clean up before its session counts as lost.
CANCEL_GRACE_S = 1.0


class DeadlineExceeded(Exception):
    """A member ran past its deadline. ``lost``: it is still running, so its object must not be touched again."""

    def __init__(self, timeout_s: float, *, lost: bool) -> None:
        super().__init__(f"timed out after {timeout_s:g}s")
        self.lost = lost


class MemberCaller:
    """Calls the members of one session, one at a time, until ``close``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._num_given = self._num_done = 0

    @property
    def is_busy(self) -> bool:
        """A sync member still runs, although its caller has given up."""
        return self._num_done < self._num_given

    @property
    def has_thread(self) -> bool:
        return self._jobs is not None

    async def call(
        self, function: Callable[P, T | Awaitable[T]], timeout_s: float, /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of ``function``, which may be sync or async. Raises what it raises, or ``DeadlineExceeded``."""
        import inspect

        if inspect.iscoroutinefunction(function):
            return await _await_within(function(*args, **kwargs), timeout_s)
        result = await self._in_thread(lambda: function(*args, **kwargs), timeout_s)
        if inspect.isawaitable(result):  # a sync member that hands out a coroutine, e.g. a decorated async one
            return await _await_within(result, timeout_s)
        return result

    def close(self) -> None:
        """Let the thread end once it is idle; a thread that hangs stays behind as a daemon."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    async def _in_thread(self, function: Callable[[], T], timeout_s: float) -> T:
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            try:
                settle = partial(_succeed, future, context.run(function))
            except BaseException as raised:  # whatever a user's code raises belongs to the waiting call
                settle = partial(_fail, future, _containable(raised))
            self._num_done += 1  # only ever written by this thread
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:  # the loop is closed, and with it the caller
                return

        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name=f"env {self._name}", daemon=True).start()
        self._num_given += 1
        self._jobs.put(job)
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout_s)
            if not done:
                raise DeadlineExceeded(timeout_s, lost=True)
            return future.result()
        finally:
            future.cancel()  # nothing where it is done; else a late result is dropped


def raised_at(error: BaseException) -> str:
    """Where in the author's own code, as words to stand behind what is told of it; empty where that is not known."""
    import sysconfig
    import traceback

    others = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]), "<")
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(others) and "site-packages" not in one.filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _containable(error: BaseException) -> Exception:
    """An ``exit()`` in a tool must not end the process, and a future refuses to carry a StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__} {error}".strip())


async def _await_within(awaitable: Awaitable[T], timeout_s: float) -> T:
    import asyncio

    async def contained() -> T:
        try:
            return await awaitable
        except SystemExit as error:  # the event loop would end on it
            raise _containable(error) from None

    task = asyncio.create_task(contained())
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if task.cancelled():  # by the author's own code; the caller still gets an answer
            raise RuntimeError("CancelledError")
        if done:
            return task.result()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        if done and not task.cancelled():
            task.exception()  # looked at, so that it is not reported as never retrieved
        raise DeadlineExceeded(timeout_s, lost=not done)
    finally:
        task.cancel()
