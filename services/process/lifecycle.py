"""The life of a service process: it runs until it is told to stop, drains, and leaves with an exit status.

Rule: SIGTERM and SIGINT only *ask*: they set one event, and the service leaves at a point where nothing is lost.
A second signal, or the end of the grace, cancels what is still running. Nothing here knows what a service does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from typing import Any, Protocol

from services.process.telemetry import get_logger

# What a cancelled service may take to clean up before it is cancelled again.
CLEANING_UP_S = 5.0


class Main(Protocol):
    """What a service does: returns when it is done, or soon after ``stop`` is set."""

    def __call__(self, stop: asyncio.Event) -> Coroutine[Any, Any, None]: ...


def run_until_signalled(main: Main, *, grace_s: float = 30.0) -> int:
    """Runs ``main(stop)``; returns 0 after an orderly end, 1 when it had to be cancelled. What it raises rises."""
    return asyncio.run(_supervise(main, grace_s))


async def _supervise(main: Main, grace_s: float) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(received: signal.Signals) -> None:
        get_logger().info("signal", signal=received.name, again=stop.is_set())
        (hurry if stop.is_set() else stop).set()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    running = asyncio.create_task(main(stop), name="main")
    too_late = asyncio.create_task(_grace_is_over(stop, hurry, grace_s), name="grace")
    try:
        await asyncio.wait({running, too_late}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
            return 0
        get_logger().error("cancelled: not drained within the grace", grace_s=grace_s)
        return 1
    finally:
        await _end(too_late)
        await _end(running)
        for number in signals:
            loop.remove_signal_handler(number)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancels until it is over: before Python 3.12 ``asyncio.wait_for`` may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CLEANING_UP_S)
    if not task.cancelled():
        task.exception()  # looked at, so that it is not reported as never retrieved


async def _grace_is_over(stop: asyncio.Event, hurry: asyncio.Event, grace_s: float) -> None:
    await stop.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await hurry.wait()
