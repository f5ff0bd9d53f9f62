"""The life of a service process: it runs until told to stop, drains, and exits with a status.

Rule: SIGTERM and SIGINT only *ask*: they set one event, and the service leaves at a point where nothing is lost. A
second signal, or the end of the grace period, cancels it. Nothing here knows what a service does. A service stays the
account that it was started as: data directory, logs and sockets belong to that one, and to change it half-way would
leave them to two. Where it is root that is said once it works, since nothing of it is given up: only processes that run
others' code change theirs (the hosts behind a wall).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from functools import cache
from typing import Protocol

from services.process.telemetry import get_logger

ADVICE = (
    "whoever gets the better of a service that is root has the machine, and where there is no wall every environment "
    "is root as well: start it as an account of its own (docs/security.md)"
)
# Time to clean up after a cancellation, before the next one.
CLEANING_UP_S = 5.0
# New objects, so many that the collector of cycles looks at them: nearly all that a request makes is freed without it.
COLLECT_AFTER = 10_000


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@cache
def tell_of_root() -> None:
    """Once per process, when it has begun to serve: one that cannot begin says only why."""
    if is_root():
        get_logger().warning("this service runs as root", advice=ADVICE)


class Main(Protocol):
    """Returns when the service is done, or soon after ``stop`` is set."""

    async def __call__(self, stop: asyncio.Event) -> None: ...


def run_until_signalled(main: Main, *, grace_s: float = 30.0, computes: bool = False) -> int:
    """Runs ``main(stop)``; returns 0 after an orderly end, 1 after a cancellation. Its errors propagate.

    ``computes``: it shares memory with processes beside it, which need to look into each other.
    """
    # Late: nothing else of the API needs it at its start.
    from services.process.own_secrets import hide_secrets, refuse_inspection

    hide_secrets()
    if not computes:
        refuse_inspection()
        _collect_seldom()
    return asyncio.run(_supervise(main, grace_s))


def _collect_seldom() -> None:
    """What was imported stays as long as the process, so no collection looks at it again."""
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


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
        get_logger().error("cancelled: did not drain within the grace period", grace_s=grace_s)
        return 1
    finally:
        await _end(too_late)
        await _end(running)
        for number in signals:
            loop.remove_signal_handler(number)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel until it is over: before Python 3.12 ``asyncio.wait_for`` may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CLEANING_UP_S)
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it


async def _grace_is_over(stop: asyncio.Event, hurry: asyncio.Event, grace_s: float) -> None:
    await stop.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await hurry.wait()
