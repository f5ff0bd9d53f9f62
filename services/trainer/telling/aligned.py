"""Notices updates that agree too well: old data say the same step after step, whatever was learned of them meanwhile.

Rule: the mean over some steps is judged, because that of a single step is noise. It stops nothing. The signal is that
of GAC (2603.01501), here against the running mean of the earlier gradients, which the optimizer keeps anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from gspo_core.bounds import exceeds
from gspo_core.objective import Alarm

ALIGNMENT = "learner/grad_alignment"
WINDOW_STEPS = 8
# Over so many steps, data that are up to four steps old were seen at 0.20 at most, and data of which all were sampled
# by one old version at 0.31 to 0.47 (benchmarks/results/step_bounds.json).
MAX_MEAN = 0.25


class AlignedGradients:
    """The alignment of one run's updates, fed with the metrics of every step."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=WINDOW_STEPS)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """A step without a gradient says nothing."""
        if ALIGNMENT in metrics:
            self._steps.append(float(metrics[ALIGNMENT]))

    def alarms(self, kind: StrEnum, metrics: Mapping[str, float]) -> list[Alarm]:
        self.note(metrics)
        mean = sum(self._steps) / WINDOW_STEPS
        if len(self._steps) < WINDOW_STEPS or not exceeds(mean, MAX_MEAN):
            return []
        age = f"{metrics['staleness/mean']:.3g}" if "staleness/mean" in metrics else "unknown"
        meaning = (
            f"over {WINDOW_STEPS} steps update after update went the same way, as data of an old policy make them do; "
            f"the data's mean age is {age} steps"
        )
        return [Alarm(kind, f"{ALIGNMENT}, mean of {WINDOW_STEPS} steps", mean, MAX_MEAN, meaning)]
