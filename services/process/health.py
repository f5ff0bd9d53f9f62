"""Liveness of processes that serve no HTTP, through a file that the event loop touches.

Rule: alive means that the process exists and its event loop turns, and nothing else: a Redis that is away must not
restart a whole fleet. A file of an earlier process (its volume outlives it) counts for nothing, nor does a change of
the wall clock or a machine that slept: both sides read the time since its boot. ``python -m services.process.health
FILE`` is the probe: alive; with ``--ready``, also ready and not about to leave. It runs every few seconds in every
container, so it imports nothing of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

TOUCH_S = 1.0
# A loop that is busy for this long serves nothing.
STALE_S = 30.0
# By what a file may be ahead of its reader: they round.
AHEAD_S = 1.0
UPTIME = Path("/proc/uptime")


class Health:
    """``async with Health(file, stop) as health``; without a file it does nothing."""

    def __init__(self, path: Path | None, stop: asyncio.Event) -> None:
        self._path = path
        self._stop = stop
        self._touching: asyncio.Task[None] | None = None
        self.is_ready = False

    async def __aenter__(self) -> Self:
        if self._path is not None:
            self._touching = asyncio.create_task(self._touch(self._path), name="health")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._touching is not None:
            self._touching.cancel()
            await asyncio.wait({self._touching})
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _touch(self, path: Path) -> None:
        beside = path.with_name(f".{path.name}")
        who = {"pid": os.getpid(), "born": born(os.getpid())}
        while True:
            ready = self.is_ready and not self._stop.is_set()
            beside.write_text(json.dumps({"at": since_boot(), "ready": ready, **who}))
            beside.replace(path)
            if self._stop.is_set():
                await asyncio.sleep(TOUCH_S)
                continue
            with contextlib.suppress(TimeoutError):  # a process that is asked to leave says so at once
                async with asyncio.timeout(TOUCH_S):
                    await self._stop.wait()


def examine(path: Path, *, ready: bool, now: float) -> str | None:
    """The problem, or None."""
    try:
        said = json.loads(path.read_text())
        at, pid, birth = float(said["at"]), int(said["pid"]), said["born"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read: {error!r}"
    if birth != born(pid):
        return f"process {pid}, which wrote {path}, is gone"
    age_s = now - at
    if age_s < -AHEAD_S:
        return f"{path} was written {-age_s:.0f} s ahead of this clock"
    if age_s > STALE_S:
        return f"the event loop has been stuck for {age_s:.0f} s"
    if ready and not said["ready"]:
        return "not ready"
    return None


def since_boot() -> float:
    """Seconds as the probe in bash reads them, also while the machine sleeps. The clocks of gVisor and containers with
    lxcfs do not say what /proc/uptime says there. macOS has neither it nor a clock that goes on."""
    try:
        return float(UPTIME.read_text().split()[0])
    except OSError:
        return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def born(pid: int) -> str | None:
    """The start of the process on the kernel's clock, which tells it from a later process with the same id. None if
    there is no such process, or no way to know."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m services.process.health", description="Tells whether the process next to this one is alive."
    )
    parser.add_argument("file", type=Path, help="its GSPO_HEALTH_FILE")
    parser.add_argument("--ready", action="store_true", help="also require it to be ready and not shutting down")
    arguments = parser.parse_args()
    problem = examine(arguments.file, ready=arguments.ready, now=since_boot())
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
