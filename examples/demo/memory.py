"""How much memory this process and all below it hold together at the most.

Rule: a page that several processes share counts once in the sum (proportional set size, as Linux keeps it). It looks
once a second, so a shorter peak may be missed. Where the system does not tell, there is no number.
"""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType
from typing import Self

INTERVAL_S = 1.0
_PROC = Path("/proc")
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


class PeakMemory:
    """``with PeakMemory() as peak``: looks again and again, for the last time when the block ends."""

    num_bytes: int | None = None
    """None where nothing could be read."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _look_on(self) -> None:
        while True:
            is_last = self._ended.is_set()
            found = memory_of_tree(os.getpid())
            if found is not None:
                self.num_bytes = max(found, self.num_bytes or 0)
            if is_last:
                return
            self._ended.wait(INTERVAL_S)


def memory_of_tree(root: int) -> int | None:
    """Bytes that ``root`` and its descendants hold now; None where the system does not tell."""
    found = [size for pid in process_tree(root) if (size := _proportional_bytes(pid)) is not None]
    return sum(found) if found else None


def process_tree(root: int) -> list[int]:
    """``root`` and its descendants that live now."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            # The name before the last parenthesis may hold anything.
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
        children[parent].append(int(entry.parent.name))
    tree = [root]
    for pid in tree:
        tree += children[pid]
    return tree


def _proportional_bytes(pid: int) -> int | None:
    try:
        found = _PSS.search((_PROC / str(pid) / "smaps_rollup").read_text())
    except OSError:  # it has ended, or is not ours
        return None
    return int(found[1]) << 10 if found else None
