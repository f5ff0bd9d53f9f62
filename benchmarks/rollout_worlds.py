"""Worlds that the rollout benchmarks are played in. They cost little, so that what is measured is the worker."""

from __future__ import annotations

import os
from typing import Any, ClassVar

LONG, LONG_TASK = "A SAGA", 63
_WORDS = "the quick brown fox jumps over the lazy dog and runs on "


def _words(num_chars: int) -> str:
    return (_WORDS * (num_chars // len(_WORDS) + 1))[:num_chars]


class Library:
    """Read one page after the other."""

    tasks: list[dict[str, Any]] = [{"title": ""}] * 63 + [{"title": LONG}]
    replayable = True

    def __init__(self, page_chars: int, foreword_chars: int = 0) -> None:
        self._page = _words(page_chars)
        self._foreword = _words(foreword_chars)

    async def reset(self, title: str) -> str:
        return f"{title} {self._foreword} {self._page}"

    async def read(self, page: int) -> str:
        """Read a page.

        Args:
            page: its number
        """
        return self._page

    async def get_reward(self) -> float:
        return 1.0


class Bomb(Library):
    """Whoever reads here ends the process of the world."""

    replayable = False

    async def read(self, page: int) -> str:
        """Read a page.

        Args:
            page: its number
        """
        os._exit(3)


class Elsewhere:
    """Tasks of an agent that the benchmark itself plays."""

    tasks: list[dict[str, Any]] = [{}] * 64
    hosting: ClassVar = {"sessions_per_process": 64, "max_processes": 32}
