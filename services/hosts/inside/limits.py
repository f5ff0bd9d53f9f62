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

from gspo_core import descendants
from services.hosts.wire import HARD_MEMORY_FACTOR

_PAGE = os.sysconf("SC_PAGE_SIZE")
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


def bytes_with_descendants(pid: int, shared_before: int) -> int:
    """Memory that a process holds for itself, and that everything holds which comes from it; what they share with each
    other counts too, beyond the bytes that were shared before any session."""
    below, more = {pid}, True
    parents = descendants.parents()
    while more:
        found = {child for child, parent in parents.items() if parent in below} - below
        below, more = below | found, bool(found)
    # Shares: what a fork still has in common with its parent would otherwise count once for each.
    own = sum(_told(child, "smaps_rollup", "Pss_Anon:") for child in below - {pid})
    shared = sum(_told(one, "smaps_rollup", "Pss_Shmem:") for one in below) if len(below) > 1 else shared_bytes(pid)
    return resident_bytes(pid) + own + max(0, shared - shared_before)


def shared_bytes(pid: int) -> int:
    """Memory of a process that others may hold as well, files of a disk left out."""
    return _told(pid, "status", "RssShmem:")


def _told(pid: int, file: str, name: str) -> int:
    """Bytes; 0 if it is gone or this cannot be read."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_bytes().split(b"\n"):  # the name of a process may hold all else
            if line.startswith(name.encode()):
                return int(line.split()[1]) << 10
    return 0


class Peak:
    """The most memory that this process held for itself since this was made.

    Files that it maps are no such memory: the kernel may take their pages back. It knows one peak of both, though, so
    the most that was ever seen mapped is left out. It misses a file that was unmapped before a look, and memory that
    briefly took the place of a file's pages: the watch and the hard bound cover these.
    """

    def __init__(self) -> None:
        self._before, self._mapped_before = _peak_bytes(), _mapped_bytes()
        self._seen = self._before
        self._mapped = 0

    def is_beyond(self, most_bytes: int) -> bool:
        """To be asked after each answer: it looks at what is mapped when there is more than ever."""
        peak = _peak_bytes()
        if peak > self._seen:
            self._seen = peak
            self._mapped = max(self._mapped, _mapped_bytes() - self._mapped_before)
        return peak - self._before - self._mapped > most_bytes


def _peak_bytes() -> int:
    """The most memory that this process ever held, files included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def _mapped_bytes() -> int:
    """Parts of files on disk that are in this process's memory now."""
    return _told(os.getpid(), "status", "RssFile:")


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
