"""Student's t distribution, by its incomplete beta function: the library needs nothing more of a statistics package."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_TINY = 1e-300
_MOST_TERMS = 500


def normal_quantile(probability: float) -> float:
    return NormalDist().inv_cdf(probability)


def t_probability(t: float, freedom: float) -> float:
    """P(T <= t) for ``freedom`` degrees."""
    middle = _incomplete_beta(0.5, freedom / 2, t * t / (freedom + t * t))
    return 0.5 + math.copysign(middle / 2, t)


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: float) -> float:
    """The t of which P(T <= t) is ``probability``."""
    low, high = -1.0, 1.0
    while t_probability(low, freedom) > probability:
        low *= 2
    while t_probability(high, freedom) < probability:
        high *= 2
    while high - low > 1e-12 * max(1.0, abs(low)):
        middle = (low + high) / 2
        if t_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # The fraction converges fast on this side; on the other one by symmetry.
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method."""
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            change = c * d
            value *= change
        if abs(change - 1) < 1e-15:
            break
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
