"""Compares what was measured with a bound, so that NaN never passes in silence.

Rule: NaN compares as false with everything, so `value > bound` lets it through as good and `value <= bound` condemns
its source. `exceeds` and `falls_below` are for alarms and limits: what is not a number is not known to be within them.
`reaches` is for decisions that must not be made on it: it raises. `tests/repo/test_bounds.py` keeps plain comparisons
with settings and constants out of the code.
"""

from __future__ import annotations

import math


class NotANumber(ValueError):
    """A measured value is NaN, so that nothing can be decided by it."""


def exceeds(value: float, bound: float) -> bool:
    """Whether a value is above its bound, or is no number."""
    return not value <= bound


def falls_below(value: float, bound: float) -> bool:
    """Whether a value is below its bound, or is no number."""
    return not value >= bound


def reaches(value: float, bound: float, what: str) -> bool:
    """Whether a value is at its bound or above. Raises NotANumber, which names ``what``."""
    if math.isnan(value) or math.isnan(bound):
        raise NotANumber(f"{what} is not a number: it cannot be compared with {bound:g}")
    return value >= bound
