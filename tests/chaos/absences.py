"""Who could not act, or could not be reached, and when: processes that were stopped, and Redis.

The rule kept here: only what the run itself has brought about is noted. A slow machine is no absence.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

REDIS = "redis"


@dataclass(frozen=True)
class Absence:
    """Of ``who``, a process or Redis; or of Redis for that process alone. In Unix seconds."""

    who: str
    begin: float
    end: float


class Absences:
    def __init__(self) -> None:
        self.noted: list[Absence] = []
        self._away: dict[tuple[str, int], float] = {}

    def is_away(self, who: str, pid: int) -> None:
        """From now on. Once more is no news."""
        self._away.setdefault((who, pid), time.time())

    def is_back(self, who: str, pid: int) -> None:
        """Or it is gone for good."""
        begin = self._away.pop((who, pid), None)
        if begin is not None:
            self.noted.append(Absence(who, begin, time.time()))

    @contextmanager
    def of(self, who: str) -> Iterator[None]:
        begin = time.time()
        try:
            yield
        finally:
            self.noted.append(Absence(who, begin, time.time()))


def seconds_away(absences: Collection[Absence], names: Collection[str], begin: float, end: float) -> float:
    """How much of the time from ``begin`` to ``end`` any of ``names`` was away."""
    away_s, reached = 0.0, begin
    for one in sorted(absences, key=lambda one: one.begin):
        if one.who in names and one.end > reached and one.begin < end:
            away_s += min(one.end, end) - max(one.begin, reached)
            reached = min(one.end, end)
    return away_s
