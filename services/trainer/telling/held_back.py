"""Notices a policy that is paid for something else than what was meant: the trained reward holds, another one falls.

An environment reports a second reward with every episode, ``ctx.metric("held_back_reward", value)``, which nothing
trains. Rule: windows of some steps are compared, with their standard errors; where both fall the run has fallen, which
other alarms tell. It stops nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gspo_core.bounds import falls_below
from gspo_core.log.sequences import HELD_BACK
from gspo_core.objective import Alarm

WINDOW_STEPS = 5
# The best window is the highest of many, so chance alone puts it above the others.
STANDARD_ERRORS = 4.0


@dataclass(frozen=True)
class _Window:
    held_back: float
    error: float
    """Standard error of it."""
    trained: float


class HeldBackReward:
    """The held-back reward of one run, fed with the metrics of every step."""

    def __init__(self) -> None:
        self._steps: deque[_Window] = deque(maxlen=WINDOW_STEPS)
        self._best: _Window | None = None

    def note(self, metrics: Mapping[str, Any]) -> _Window | None:
        """The last steps together; None before there are enough of them."""
        if not {f"{HELD_BACK}/mean", "reward/mean"} <= metrics.keys():
            return None
        error = metrics[f"{HELD_BACK}/std"] / math.sqrt(max(1.0, metrics[f"{HELD_BACK}/count"]))
        self._steps.append(_Window(float(metrics[f"{HELD_BACK}/mean"]), error, float(metrics["reward/mean"])))
        if len(self._steps) < WINDOW_STEPS:
            return None
        now = _Window(
            sum(one.held_back for one in self._steps) / WINDOW_STEPS,
            math.hypot(*(one.error for one in self._steps)) / WINDOW_STEPS,
            sum(one.trained for one in self._steps) / WINDOW_STEPS,
        )
        if self._best is None or now.held_back > self._best.held_back:
            self._best = now
        return now

    def alarms(self, kind: StrEnum, metrics: Mapping[str, float]) -> list[Alarm]:
        now, best = self.note(metrics), self._best
        if now is None or best is None or falls_below(now.trained, best.trained):
            return []
        bound = best.held_back - STANDARD_ERRORS * math.hypot(now.error, best.error)
        if not falls_below(now.held_back, bound):
            return []
        meaning = (
            f"a reward that is not trained fell to {now.held_back:.3g}, from {best.held_back:.3g} at its best; "
            f"the trained one was {best.trained:.3g} then and is {now.trained:.3g} now"
        )
        return [Alarm(kind, f"{HELD_BACK}/mean", now.held_back, bound, meaning)]
