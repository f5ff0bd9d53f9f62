"""The metrics of a job by step, with a bounded number of steps.

The rule: a step has one value per name, the last one written. A step that was trained is reported with its event in one
call, once, and that replaces all that was said of the step before, in a history that was left. It neither computes nor
names metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gspo_core.position import Position
from services.state.functions import Functions
from services.state.jobs import JobNotFound
from services.state.keys import job_key, job_keys
from services.state.refusals import Missing


class MetricSeries:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._redis = functions.redis

    async def add(self, job: str, step: int, metrics: Mapping[str, float], *, token: str | None = None) -> None:
        """Add values to a step, overwriting existing names. All values must be finite.

        With a ``token`` only the owner may add (else Fenced). Raises JobNotFound.
        """
        flat = _flat(step, metrics)
        try:
            await self._functions.call("add_metrics", job_keys(job), token or "", step, *flat)
        except Missing:
            raise JobNotFound(job) from None

    async def report(
        self, job: str, at: Position, metrics: Mapping[str, float], event: Mapping[str, Any], *, token: str
    ) -> None:
        """The numbers of a step that was trained, and the event ``step``; nothing where it, or a later one, was
        reported before. Raises Fenced, JobNotFound."""
        flat, text = _flat(at.step, metrics), json.dumps(dict(event), separators=(",", ":"), allow_nan=False)
        try:
            await self._functions.call("report_step", job_keys(job), token, at.epoch, at.step, text, *flat)
        except Missing:
            raise JobNotFound(job) from None

    async def reported(self, job: str) -> Position | None:
        """The last step that ``report`` was given; None if it never was."""
        epoch, step = await self._redis.hmget(job_key(job, "job"), "reported_epoch", "reported_step")
        return None if epoch is None else Position(int(epoch), int(step))

    async def read(self, job: str, from_step: int = 0) -> list[dict[str, Any]]:
        """One dict per step, in order: ``{"step": n, name: value, ...}``. What is no step is passed over."""
        rows = await self._functions.call("read_metrics", job_keys(job), from_step)
        return [_row(row) for row in rows if row[0].isdigit()]


def _flat(step: int, metrics: Mapping[str, float]) -> list[str]:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name} of step {step} is not a finite number: {value}")
    return [text for name, value in metrics.items() for text in (name, repr(float(value)))]


def _row(row: list[bytes]) -> dict[str, Any]:
    names, order = _layout(tuple(row[1::2]))
    values = row[2::2]
    return {"step": int(row[0]), **{name: float(values[place]) for name, place in zip(names, order, strict=True)}}


@lru_cache(maxsize=256)
def _layout(names: tuple[bytes, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The sorted names and the position of each value; the steps of a job share them."""
    order = sorted(range(len(names)), key=lambda place: names[place].decode())
    return tuple(names[place].decode() for place in order), tuple(order)
