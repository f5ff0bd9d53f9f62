"""Bounds the resources of a host's process.

Rule: bounds are set before any session's code runs and cannot be raised again. Memory is bounded twice: a request that
is far too large fails at once (``MemoryError``) and does no harm; a process that really held too much is ended, by the
fork server's watch or by itself once it has a result.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
# The hard bound lies above the watched one: a process that allocates in small pieces is ended whole, with a reason.
HARD_MEMORY_FACTOR = 1.5
MAX_OPEN_FILES = 4096
OVER_MEMORY_STATUS = 99
"""Exit status of a process that found it had used too much."""


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
