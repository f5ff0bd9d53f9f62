"""Notices a weight of `advantage.part_weights` whose part no episode reports: a name that was mistyped drops it.

Rule: the first episodes of a job are judged, once. A part that seldom appears is missed by chance only: one that a
hundredth of the episodes report, in one job of thirteen. It stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from gspo_core.log.sequences import PARTS
from gspo_core.objective import Alarm

# As many, over two steps and more; small batches are judged when there are enough steps.
MIN_EPISODES = 256
MIN_STEPS = 2
ENOUGH_STEPS = 8
# Only episodes that are nearly too long are given it.
SELDOM = frozenset({"overlong"})


class UnreportedParts:
    """The parts that one job's episodes report, fed with the metrics of every step."""

    def __init__(self) -> None:
        self._shares: dict[int, Mapping[str, float]] = {}
        """By step and name, until there is enough to judge."""
        self._num_episodes: dict[int, float] = {}
        self._is_judged = False

    def note(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether this is the step after which to judge. A step that is taken again counts once."""
        shares = {name.removeprefix(PARTS): float(metrics[name]) for name in metrics if name.startswith(PARTS)}
        if self._is_judged or not shares:
            return False
        self._shares[step], self._num_episodes[step] = shares, float(metrics["episodes/count"])
        has_many = len(self._shares) >= MIN_STEPS and sum(self._num_episodes.values()) >= MIN_EPISODES
        self._is_judged = has_many or len(self._shares) >= ENOUGH_STEPS
        return self._is_judged

    def alarms(self, kind: StrEnum, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        if not self.note(step, metrics):
            return []
        reported = {name for shares in self._shares.values() for name, share in shares.items() if share}
        # The metrics name a part without a weight only if an episode reports it.
        missing = {name for shares in self._shares.values() for name in shares} - reported - SELDOM
        if not missing:
            return []
        meaning = (
            f"no episode of the first {len(self._shares)} steps reports {_listed(missing)}, which has a weight; "
            f"reported are {_listed(reported) or 'no parts at all'}"
        )
        return [Alarm(kind, f"{PARTS}{min(missing)}", 0.0, 0.0, meaning)]


def _listed(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
