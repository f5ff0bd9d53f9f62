"""A world that takes all it can get while a file is there, and waits as long while it is not (`hostile_neighbour`).

Only the standard library: it runs behind the wall. Each task takes something else: memory, processes, disk, processors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

LASTS_S = 6.0
NUM_CHILDREN, NUM_SPINNING = 6, 8
MB_EACH = 150
COPIED = 16 << 20
"""More than a processor keeps in its caches."""
PIECE = bytes(4 << 20)


def _memory(until: float) -> None:
    """Six children, each within its bound, that fill 900 MiB in the quarter of a second before anybody looks."""
    while time.monotonic() < until:
        _wait([_child(lambda: _fill(MB_EACH)) for _ in range(NUM_CHILDREN)])


def _processes(until: float) -> None:
    while time.monotonic() < until:
        children: list[int] = []
        with contextlib.suppress(OSError):
            while time.monotonic() < until:
                children.append(_child(signal.pause))
        for child in children:
            os.kill(child, signal.SIGKILL)
        _wait(children)


def _disk(until: float) -> None:
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
            for number in range(1 << 12):
                Path(folder, str(number)).write_bytes(PIECE)


def _processors(until: float) -> None:
    """Half of them count, half of them push everybody else's memory out of the caches."""
    kinds: tuple[Callable[[float], None], ...] = (_count, _copy)
    children = [_child(partial(kinds[number % len(kinds)], until)) for number in range(NUM_SPINNING)]
    _wait(children)


def _count(until: float) -> None:
    while time.monotonic() < until:
        sum(range(100_000))


def _copy(until: float) -> None:
    one, two = bytearray(COPIED), bytearray(COPIED)
    while time.monotonic() < until:
        one[:] = two


def _child(act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return pid


def _fill(mb: int) -> None:
    memory = mmap.mmap(-1, mb << 20)
    for place in range(0, mb << 20, mmap.PAGESIZE):
        memory[place] = 1


def _wait(children: list[int]) -> None:
    for child in children:
        os.waitpid(child, 0)


KINDS = {"memory": _memory, "processes": _processes, "disk": _disk, "processors": _processors}


class Greedy:
    """Say a word."""

    tasks = [{"kind": kind} for kind in KINDS]  # noqa: RUF012 - never changed
    hosting = {"sessions_per_process": 1, "memory_mb": 256, "file_mb": 16}  # noqa: RUF012 - never changed

    def __init__(self, switch: str) -> None:
        self._switch = Path(switch)

    def reset(self, kind: str) -> str:
        until = time.monotonic() + LASTS_S
        if self._switch.exists():
            KINDS[kind](until)
        time.sleep(max(0.0, until - time.monotonic()))
        return "Say a word."

    def get_reward(self) -> float:
        return 0.0
