"""Which of two policies is better, from episodes of the same tasks.

Rule: pairs are compared, never two means: a task that is hard for both says nothing about either. Only tasks on which
both have a reward count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gspo_core.evaluation.intervals import CONFIDENCE, mean_interval
from gspo_core.evaluation.quantiles import normal_quantile
from gspo_core.json_value import JSON

# Up to this many differing tasks every assignment of signs is looked at.
_EXACT_TASKS = 14
_NUM_DRAWS = 20_000


@dataclass(frozen=True, slots=True)
class PolicyDifference:
    """How much the first of two policies is better."""

    mean: float
    low: float | None
    high: float | None
    p_value: float
    """The chance of a difference at least as large, in either direction, if the two were alike."""
    method: Literal["mcnemar", "sign_flips"]
    num_tasks: int
    num_better: int
    """Tasks on which the first is better."""
    num_worse: int
    confidence: float = CONFIDENCE

    @property
    def is_share(self) -> bool:
        return self.method == "mcnemar"

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


def difference(
    ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], confidence: float = CONFIDENCE
) -> PolicyDifference | None:
    """The difference over the tasks that both have values of, by task. None where there is no such task."""
    common = sorted(task for task in ours.keys() & theirs.keys() if ours[task] and theirs[task])
    if not common:
        return None
    differences = [_mean(ours[task]) - _mean(theirs[task]) for task in common]
    num_better, num_worse = sum(one > 0 for one in differences), sum(one < 0 for one in differences)
    mean = _mean(differences)
    pairs = [(ours[task], theirs[task]) for task in common]
    if all(len(one) == 1 and one[0] in (0, 1) for pair in pairs for one in pair):
        low, high = shares_interval(num_better, num_worse, len(common), confidence)
        p_value = mcnemar(num_better, num_worse)
        return PolicyDifference(mean, low, high, p_value, "mcnemar", len(common), num_better, num_worse, confidence)
    bounds = mean_interval(differences, confidence)
    p_value = sign_flips(differences)
    return PolicyDifference(mean, *bounds, p_value, "sign_flips", len(common), num_better, num_worse, confidence)


def mcnemar(num_better: int, num_worse: int) -> float:
    """The exact test on the tasks that one solves and the other does not."""
    differing = num_better + num_worse
    fewer = min(num_better, num_worse)
    tail = sum(math.comb(differing, number) for number in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << differing))


def shares_interval(num_better: int, num_worse: int, num_tasks: int, confidence: float) -> tuple[float, float]:
    """Wald's interval for the difference of two paired shares, with one more pair of each kind (Bonett and Price)."""
    better, worse = (num_better + 1) / (num_tasks + 2), (num_worse + 1) / (num_tasks + 2)
    error = math.sqrt((better + worse - (better - worse) ** 2) / (num_tasks + 2))
    half = normal_quantile((1 + confidence) / 2) * error
    return max(-1.0, better - worse - half), min(1.0, better - worse + half)


def sign_flips(differences: Sequence[float]) -> float:
    """The share of ways to exchange the two policies on some of the tasks that make as large a difference."""
    unequal = np.array([one for one in differences if one != 0])
    if not len(unequal):
        return 1.0
    observed = abs(float(unequal.sum()))
    reached = observed * (1 - 1e-12)
    if len(unequal) <= _EXACT_TASKS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(unequal))))
        return float((np.abs(signs @ unequal) >= reached).mean())
    # The same every time: the p-value of a comparison is no matter of luck.
    generator = np.random.default_rng(0)
    count = sum(int((_drawn(generator, unequal) >= reached).sum()) for _ in range(_NUM_DRAWS // 1000))
    return (1 + count) / (1 + _NUM_DRAWS)


def _drawn(generator: np.random.Generator, values: NDArray[np.float64]) -> NDArray[np.float64]:
    signs = 2.0 * generator.integers(0, 2, size=(1000, len(values)), dtype=np.int8) - 1.0
    return np.abs(signs @ values)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
