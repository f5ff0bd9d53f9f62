"""Checks the stop conditions of a job: all steps done, target reward reached, no more progress, or out of time.

Rule: the answer depends only on stored data (metrics by step, and the start time of the job), so a trainer that takes
over reaches the same answer. This module does not end the job itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from gspo_core.bounds import NotANumber, reaches
from gspo_core.spec import JobSpec
from gspo_core.stop_spec import NoProgress, RewardTarget
from services.state.store import JobRecord, StatusReason, Store


class StopConditions:
    """Stop conditions of one job. Pass every reported metric to ``note``."""

    def __init__(self, store: Store, job: str, now: Callable[[], float] = time.time) -> None:
        self._store = store
        self._job = job
        self._now = now
        self._series: dict[str, dict[int, float]] = {}
        """Values of each watched series, by step."""

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, values in self._series.items():
            if name in metrics:
                values[step] = metrics[name]

    async def reached(self, job: JobRecord, spec: JobSpec, step: int) -> StatusReason | None:
        """Return why the job ends after ``step`` steps, or None if it continues."""
        if step >= spec.steps:
            return StatusReason("steps_done", f"all {spec.steps} steps are done")
        stop = spec.stop
        await self._watch({one.series for one in (stop.reward, stop.no_progress) if one is not None}, step)
        if stop.reward is not None and (said := self._is_good_enough(stop.reward)):
            return StatusReason("reward_reached", said)
        if stop.no_progress is not None and (said := self._rises_no_more(stop.no_progress)):
            return StatusReason("reward_stands_still", said)
        if stop.wall_time_s is not None and job.started_at is not None:
            elapsed_s = self._now() - datetime.fromisoformat(job.started_at).timestamp()
            if reaches(elapsed_s, stop.wall_time_s, "the time since the job began"):
                return StatusReason("time_over", f"{elapsed_s:.0f} s have passed; the limit is {stop.wall_time_s:g} s")
        return None

    async def _watch(self, wanted: set[str], step: int) -> None:
        """Watch the ``wanted`` series, loading their earlier values from the store. Values after ``step`` are of a
        history that the job has left."""
        if wanted == self._series.keys():
            return
        rows = [row for row in await self._store.metrics.read(self._job) if row["step"] <= step]
        self._series = {name: {row["step"]: row[name] for row in rows if name in row} for name in wanted}

    def _is_good_enough(self, target: RewardTarget) -> str:
        last = self._values(target.series)[-target.times :]
        if len(last) < target.times or not all(reaches(one, target.at_least, target.series) for one in last):
            return ""
        return f"{target.series} was at least {target.at_least:g} {target.times} times in a row"

    def _rises_no_more(self, condition: NoProgress) -> str:
        best, since = float("-inf"), 0
        for value in self._values(condition.series):
            is_better = value > best + condition.min_gain
            best, since = (value, 0) if is_better else (best, since + 1)
        if since < condition.values:
            return ""
        return f"none of the last {since} values of {condition.series} improved on {best:g}"

    def _values(self, series: str) -> list[float]:
        """Return the values in step order. Raises NotANumber, because NaN must not decide whether a job ends."""
        values = [value for _, value in sorted(self._series[series].items())]
        if any(map(math.isnan, values)):
            raise NotANumber(f"{series} contains NaN, so no stop condition can be judged by it")
        return values
