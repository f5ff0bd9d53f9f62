"""Processes that come from this one, what becomes of them when one of the line ends, and how one ended, in words.

Rule: on Linux nothing that was started escapes, not even a daemon; elsewhere these functions do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Has this process killed when its parent ``parent`` ends; ends at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undoes ``die_with``: there is something to clean up first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def be_told_of_parents_end() -> None:
    """SIGTERM instead of SIGKILL: there is something to clean up first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, so that they cannot escape."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_strays(known: Collection[int]) -> None:
    """Kills the children of this process that are not ``known``: a dead process left them behind."""
    for pid in children() - set(known):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def children() -> frozenset[int]:
    """The children of this process; empty where this cannot be read."""
    me = os.getpid()
    return frozenset(pid for pid, parent in parents().items() if parent == me)


def parents() -> Mapping[int, int]:
    """The parent of every process that can be seen; empty where this cannot be read."""
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()] if sys.platform == "linux" else []
    return {int(entry.name): _parent_of(entry) for entry in entries}


def _parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def how_it_ended(status: int) -> str:
    """In words, of a process that was kept: its exit status, or minus the signal that ended it."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"{name}: killed by itself, or for lack of memory" if name == "SIGKILL" else name
