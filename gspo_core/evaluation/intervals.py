"""What a number of played episodes says about a policy: the mean reward, and how far off it may be.

Rule: the unit is the task. Episodes of one task are alike, so their number never makes an interval narrower than the
number of tasks allows. Each task weighs the same, however many of its episodes have a reward. An episode without a
reward is not in here, and is never taken for 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from gspo_core.evaluation.quantiles import normal_quantile, t_quantile
from gspo_core.json_value import JSON

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class MeanScore:
    """A mean with its interval."""

    mean: float
    low: float | None
    """None where nothing can be said: a single task with no other to compare it with."""
    high: float | None
    method: Literal["wilson", "t"]
    """``wilson`` where every value is 0 or 1, so that the mean is a share of successes."""
    num_tasks: int
    num_episodes: int
    confidence: float = CONFIDENCE

    @property
    def is_share(self) -> bool:
        return self.method == "wilson"

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


def score(values_by_task: Sequence[Sequence[float]], confidence: float = CONFIDENCE) -> MeanScore | None:
    """The score of the episodes' values, one sequence for each task; tasks without a value do not count.

    None without any value.
    """
    tasks = [values for values in values_by_task if values]
    if not tasks:
        return None
    num_episodes = sum(map(len, tasks))
    means = [math.fsum(values) / len(values) for values in tasks]
    mean = math.fsum(means) / len(means)
    if all(value in (0, 1) for values in tasks for value in values):
        low, high = _share_interval(mean, means, num_episodes, confidence)
        return MeanScore(mean, low, high, "wilson", len(tasks), num_episodes, confidence)
    low, high = mean_interval(means, confidence)
    return MeanScore(mean, low, high, "t", len(tasks), num_episodes, confidence)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float | None, float | None]:
    """By Student's t; (None, None) for a single value."""
    if len(values) < 2:
        return None, None
    mean = math.fsum(values) / len(values)
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * math.sqrt(_variance(values) / len(values))
    return mean - half, mean + half


def wilson_interval(share: float, num: float, quantile: float) -> tuple[float, float]:
    """Wilson's interval of a share of ``num`` independent trials."""
    square = quantile * quantile
    center = (share + square / (2 * num)) / (1 + square / num)
    half = quantile / (1 + square / num) * math.sqrt(share * (1 - share) / num + square / (4 * num * num))
    return max(0.0, center - half), min(1.0, center + half)


def _share_interval(
    share: float, means: Sequence[float], num_episodes: int, confidence: float
) -> tuple[float | None, float | None]:
    """Wilson's interval; with several episodes a task, that of as many independent ones as they are worth."""
    num_tasks = len(means)
    if num_episodes == num_tasks:
        return wilson_interval(share, num_tasks, normal_quantile((1 + confidence) / 2))
    if num_tasks < 2:
        return None, None
    variance = _variance(means) / num_tasks
    worth = share * (1 - share) / variance if variance > 0 else 0.0
    # Between all episodes of a task being one, and each being new; the variance is itself estimated, hence t.
    worth = min(float(num_episodes), max(float(num_tasks), worth))
    return wilson_interval(share, worth, t_quantile((1 + confidence) / 2, num_tasks - 1))


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
