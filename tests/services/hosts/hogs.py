"""Worlds that take as much as they get, for tests and measurements. Only the standard library: they run inside."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any, ClassVar


class Hog:
    """Takes what it is told to."""

    tasks: ClassVar[list[dict[str, Any]]] = [{}]
    hosting: ClassVar[dict[str, int]] = {"sessions_per_process": 1}

    def reset(self) -> str:
        return "begin"

    def hog_memory(self, num_processes: int, mb_each: int, hold_s: float = 0.0) -> str:
        """Fill memory in children that begin together, or in this process.

        Args:
            num_processes: how many children; 0 is none but this one
            mb_each: MiB of each
            hold_s: for how long it is held
        """
        if not num_processes:
            _fill(mb_each, hold_s)
            return "held"
        begin, held_back = os.pipe()
        children = [_child(begin, held_back, mb_each, hold_s) for _ in range(num_processes)]
        os.close(begin)
        os.close(held_back)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        return "killed" if any(map(os.WIFSIGNALED, statuses)) else "held"

    def get_reward(self) -> float:
        return 0.0


def _child(begin: int, held_back: int, mb: int, hold_s: float) -> int:
    pid = os.fork()
    if pid == 0:
        os.close(held_back)
        os.read(begin, 1)  # until the last of them is there
        _fill(mb, hold_s)
        os._exit(0)
    return pid


def _fill(mb: int, hold_s: float) -> None:
    """Shared with whoever comes from it, so that no bound of a process's own data holds it back."""
    memory = mmap.mmap(-1, mb << 20)
    for place in range(0, mb << 20, mmap.PAGESIZE):
        memory[place] = 1
    time.sleep(hold_s)
