"""Child processes that never outlive their parent, not even after SIGKILL, and orphans that we inherit as the first
process of a container.

Linux offers both (``PR_SET_PDEATHSIG``, ``/proc``); elsewhere a child is only stopped by an orderly end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Much later than any parent of ours waits for its own child.
BURY_S = 30.0
# About a tenth of the time that a process beside it gets that wants as much.
NICENESS = 10


def die_with_parent() -> Callable[[], None] | None:
    """For ``Popen(preexec_fn=...)``. The kernel watches the thread that starts the child: let it live as long."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def ask_for_the_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask_for_the_signal


def die_before_others() -> Callable[[], None] | None:
    """``die_with_parent`` for work that can be repeated, beside work that cannot: it computes while others do not, and
    where memory runs out, the kernel ends it before any other process of the container, or of the machine."""
    ask_for_the_signal = die_with_parent()
    if ask_for_the_signal is None:
        return None

    def offer_itself() -> None:
        ask_for_the_signal()
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        with contextlib.suppress(OSError):  # everyone may raise its own
            descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(descriptor, b"1000")
            os.close(descriptor)

    return offer_itself


def die_with_launcher() -> None:
    """The same for a process whose parent is not ours to change: torchrun does not ask it of the ranks that it starts.
    Call this first of all: what its parent leaves behind before that stays."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def bury_orphans(every_s: float = BURY_S) -> None:
    """Until cancelled, reap dead children that no code of ours waits for: inherited orphans. They would stay for ever
    as zombies and use up the container's process ids."""
    before: frozenset[int] = frozenset()
    while True:
        await asyncio.sleep(every_s)
        dead = dead_children()
        for pid in before & dead:
            _bury(pid)
        before = dead


def _bury(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def dead_children() -> frozenset[int]:
    """Children that have ended and were not waited for."""
    me = str(os.getpid())
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()] if sys.platform == "linux" else []
    return frozenset(int(entry.name) for entry in entries if _state_and_parent(entry) == ["Z", me])


def _state_and_parent(entry: Path) -> list[str]:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return []
