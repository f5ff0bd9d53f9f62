"""Counts the events of a worker by cause, so that no failure is silent.

Rule: counters only rise. They are a record for people and metrics; no decision depends on them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from gspo_core.types import StopReason


class Counters:
    """Names read ``noun/cause``, as the metrics of the REST API do."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, number: int | bool = 1) -> None:
        self._counts[name] += number

    def add_s(self, name: str, seconds: float) -> None:
        """Time spent on something, over all episodes."""
        self._seconds[name] += seconds

    def episode_finished(self, stop_reason: StopReason, num_sampled: int, num_versions: int) -> None:
        self.add("episodes/finished")
        self.add(f"stop/{stop_reason}")
        self.add("tokens/finished", num_sampled)
        if num_versions > 1:
            self.add("episodes/mixed_versions")

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> Mapping[str, float]:
        times = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return dict(sorted((self._counts | times).items()))
