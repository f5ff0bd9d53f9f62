"""What a job costs while it runs: the peak memory of each process, and the bytes that Redis holds.

Rule: memory is the kernel's own high-water mark (resident set, shared pages included), set back when the watch begins,
so no peak is missed while its process lives; a process is looked at twice a second.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from examples.demo.memory import process_tree

INTERVAL_S = 0.5
_PROC = Path("/proc")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_FORGET_PEAK = "5"
"""To ``clear_refs``: the high-water mark begins anew."""
# Part of a command line -> what a child of a service is.
_CHILDREN = {"attempt_main": "attempt", "services.hosts": "host", "forkserver": "host"}


def peaks(roots: Mapping[str, int]) -> dict[str, int]:
    """Of these processes alone, since they began."""
    return {name: _peak(pid) for name, pid in roots.items()}


class Watch:
    """``with Watch(pids, url) as watch``: looks until the block ends."""

    def __init__(self, roots: Mapping[str, int], redis_url: str) -> None:
        self.memory_bytes: dict[str, int] = defaultdict(int)
        """Kind of process -> the largest peak of one."""
        self.redis_bytes = 0
        """More than at the beginning, at the most."""
        self._roots = roots
        self._redis = redis.Redis.from_url(redis_url)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)

    def __enter__(self) -> Self:
        for root in self._roots.values():
            for pid in process_tree(root):
                with contextlib.suppress(OSError):
                    (_PROC / str(pid) / "clear_refs").write_text(_FORGET_PEAK)
        self._first_bytes = self._used()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._redis.close()

    def _look_on(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self.redis_bytes = max(self.redis_bytes, self._used() - self._first_bytes)
        for name, root in self._roots.items():
            for pid in process_tree(root):
                kind = name.partition("-")[0] if pid == root else _kind(pid)
                self.memory_bytes[kind] = max(self.memory_bytes[kind], _peak(pid))

    def _used(self) -> int:
        return int(self._redis.info("memory")["used_memory"])


def _kind(pid: int) -> str:
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "other"
    return next((kind for part, kind in _CHILDREN.items() if part in command), "other")


def _peak(pid: int) -> int:
    try:
        found = _PEAK.search((_PROC / str(pid) / "status").read_text())
    except OSError:  # it has ended
        return 0
    return int(found[1]) << 10 if found else 0
