"""What a process of the host may use, and how nothing that it started outlives it.

Rule: bounds are set before any session's code runs and cannot be raised again. Memory is bounded twice: a request that
is far too large fails at once (``MemoryError``) and harms nobody; a process that really held too much is ended, by the
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
# The hard bound lies above the watched one: who allocates in small pieces is ended as a whole, with a reason.
HARD_MEMORY_FACTOR = 1.5
MAX_OPEN_FILES = 4096
OVER_MEMORY_STATUS = 99
"""Exit status of a process that found that it had held too much."""


def die_with(parent: int) -> None:
    """Be killed when process ``parent``, which started this one, ends; ends at once if it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """No longer die with the parent: there is something to clean up first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """What descendants leave behind becomes a child of this process instead of getting away."""
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
    """Memory of its own that a process holds; 0 where it is gone or where nobody can say."""
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
    """Kills children of this process that it does not know: what a dead process left behind."""
    for pid in children() - set(known):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def children() -> frozenset[int]:
    """The processes whose parent this one is; none where nobody can say."""
    me = os.getpid()
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()] if sys.platform == "linux" else []
    return frozenset(int(entry.name) for entry in entries if _parent_of(entry) == me)


def _parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
