"""Bounds the resources of a host's process, and makes sure that nothing it started outlives it.

Rule: bounds are set before any session's code runs and cannot be raised again. Memory is bounded twice: a request that
is far too large fails at once (``MemoryError``) and does no harm; a process that really held too much is ended, by the
fork server's watch or by itself once it has a result.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE = os.sysconf("SC_PAGE_SIZE")
# The hard bound lies above the watched one: a process that allocates in small pieces is ended whole, with a reason.
HARD_MEMORY_FACTOR = 1.5
MAX_OPEN_FILES = 4096
OVER_MEMORY_STATUS = 99
"""Exit status of a process that found it had used too much."""


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


def bound(memory_bytes: int, file_bytes: int) -> None:
    """Bounds this process and everything that it starts."""
    data_pages = int(Path("/proc/self/statm").read_text().split()[5]) if sys.platform == "linux" else 0
    _lower(resource.RLIMIT_DATA, data_pages * _PAGE + int(memory_bytes * HARD_MEMORY_FACTOR))
    _lower(resource.RLIMIT_FSIZE, file_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def resident_bytes(pid: int) -> int:
    """Memory that a process holds for itself; 0 if it is gone or this cannot be read."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * _PAGE


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_strays(known: Collection[int]) -> None:
    """Kills the children of this process that are not ``known``: a dead process left them behind."""
    for pid in children() - set(known):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def children() -> frozenset[int]:
    """The children of this process; empty where this cannot be read."""
    me = os.getpid()
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()] if sys.platform == "linux" else []
    return frozenset(int(entry.name) for entry in entries if _parent_of(entry) == me)


def _parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
