"""Which process of ours one is that is known by its number inside a wall."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path


def outer_pid(entered: int, inner: int) -> int | None:
    """Among the children of the first process behind the wall that ``entered`` built; None if it is gone."""
    for first in children_of(entered):
        for pid in reversed(children_of(first)):  # the newest is asked for most often
            if _number_inside(pid) == inner:
                return pid
    return None


def children_of(pid: int) -> Sequence[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def _number_inside(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):  # the name of a process may hold all else
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return None
