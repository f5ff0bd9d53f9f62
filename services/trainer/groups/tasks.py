"""Maps a group to its task: a pure function of the job's seed and the group's id.

Dispatch therefore needs no environment code, and a restarted trainer hands out the same tasks again.
Training groups count from 0; evaluation groups count from ``FIRST_EVAL_GROUP``, so that evaluating more or less often
never changes which tasks are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Far above any training group, and still easy to read in a log.
FIRST_EVAL_GROUP = 1_000_000_000


@dataclass(frozen=True)
class Task:
    environment: int
    """Position in the job's list of environments."""
    index: int
    """Position in that environment's list of tasks."""


class TaskSchedule:
    """Training tasks: interleaves environments by weight and reshuffles the tasks of each on every pass."""

    def __init__(self, seed: int, num_tasks: Sequence[int], weights: Sequence[float]) -> None:
        if len(num_tasks) != len(weights) or not num_tasks or min(num_tasks) < 1 or min(weights) <= 0:
            raise ValueError(f"every environment needs tasks and a positive weight: {num_tasks} tasks, {weights}")
        self._seed = seed
        self._num_tasks = tuple(num_tasks)
        self._shares = tuple(weight / sum(weights) for weight in weights)
        self._credit = [0.0] * len(weights)
        self._drawn = [0] * len(weights)
        self._tasks: list[Task] = []

    def task(self, group: int) -> Task:
        while len(self._tasks) <= group:
            self._tasks.append(self._next())
        return self._tasks[group]

    def _next(self) -> Task:
        """Draw from the environment furthest behind its share."""
        for environment, share in enumerate(self._shares):
            self._credit[environment] += share
        environment = max(range(len(self._credit)), key=self._credit.__getitem__)
        self._credit[environment] -= 1
        lap, position = divmod(self._drawn[environment], self._num_tasks[environment])
        self._drawn[environment] += 1
        return Task(environment, int(_shuffled(self._seed, environment, lap, self._num_tasks[environment])[position]))


def evaluation_tasks(num_tasks: Sequence[int], wanted: int) -> list[Task]:
    """Return the held-out tasks: the first ones of each environment in turn, the same in every round."""
    rows = [[Task(environment, index) for index in range(count)] for environment, count in enumerate(num_tasks)]
    longest = max(num_tasks, default=0)
    interleaved = [row[index] for index in range(longest) for row in rows if index < len(row)]
    return interleaved[:wanted]


def evaluation_group(epoch: int, round_number: int, num_tasks: int, position: int) -> int:
    """Return an id unique to the epoch, so a successor trainer never counts its predecessor's rounds."""
    return FIRST_EVAL_GROUP * (1 + epoch) + round_number * num_tasks + position


def environment_of(group: int, schedule: TaskSchedule, held_out: Sequence[Task]) -> int:
    """Return the position of the environment that ``group`` plays. ``held_out``: the tasks of each evaluation."""
    if group < FIRST_EVAL_GROUP:
        return schedule.task(group).environment
    return held_out[group % FIRST_EVAL_GROUP % len(held_out)].environment


@lru_cache(maxsize=8)
def _shuffled(seed: int, environment: int, lap: int, num_tasks: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, environment, lap)).permutation(num_tasks)
