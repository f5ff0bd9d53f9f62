"""Finds the best evaluation of a run, and whether a later one lies below it by more than chance.

Rule: an evaluation has fallen when all of its interval lies below that of the best one. It acts on nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo_core.bounds import falls_below

MEAN, LOW, HIGH = "eval/reward/mean", "eval/reward/low", "eval/reward/high"


@dataclass(frozen=True)
class Evaluated:
    step: int
    mean: float
    low: float


class BestEvaluation:
    """The best evaluation so far; pass every one to ``compare``."""

    def __init__(self) -> None:
        self.best: Evaluated | None = None

    def compare(self, step: int, metrics: Mapping[str, Any]) -> Evaluated | None:
        """Return the best evaluation if the one in these metrics lies below it."""
        if not {MEAN, LOW, HIGH} <= metrics.keys():
            return None
        best, found = self.best, Evaluated(step, float(metrics[MEAN]), float(metrics[LOW]))
        if best is None or found.low > best.low:
            self.best = found
        return best if best is not None and falls_below(float(metrics[HIGH]), best.low) else None
