"""The numbers of a job, step by step: as JSON, CSV or NDJSON, all of them or as many points as a chart needs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec
from fastapi import Header, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gspo_core.problems import near
from services.api.http.context import ContextOf
from services.api.http.errors import RequestRefused
from services.api.http.routers import v1_router
from services.api.views.store_views import MetricsView
from services.state.reports import MetricSeries

router = v1_router("metrics", "/jobs/{id}/metrics")

CSV, NDJSON = "text/csv", "application/x-ndjson"
_TEXT = {"schema": {"type": "string"}}

MetricRow: TypeAlias = dict[str, float]
"""``step`` and the metrics by name."""
Bucket: TypeAlias = Mapping[str, float | Mapping[str, float]]
"""Neighbouring rows as one: means by name, with the extremes by name under ``low`` and ``high``."""


class MetricsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    names: str | None = None
    """Comma-separated; each exact, or a beginning followed by `*`. Left out: all."""
    from_step: Annotated[int, Field(ge=0, le=2**53)] = 0
    """The first step wanted."""
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    """Rows in the answer; not together with `max_points`."""
    max_points: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """At most so many rows for all steps from `from_step` on: neighbouring steps are put together. Such a row has the
    last `step` of them, their `count`, for each name the mean, and under `low` and `high` the extremes. The newest step
    is a row of its own if there are two or more."""


@router.get("", response_model=MetricsView, responses={200: {"content": {CSV: _TEXT, NDJSON: _TEXT}}})
async def read_metrics(
    id: str, query: Annotated[MetricsQuery, Query()], context: ContextOf, accept: Annotated[str, Header()] = ""
) -> Response:
    """Metrics from a step on. `Accept: text/csv` or `application/x-ndjson` gives a file instead."""
    job = await context.store.jobs.get(id)
    rows = await _rows(context.store.metrics, job.id, query)
    shown: Sequence[Bucket] = rows[: query.limit] if query.max_points is None else downsample(rows, query.max_points)
    if CSV in accept.lower():
        return Response(_as_csv(shown), media_type=CSV)
    if NDJSON in accept.lower():
        return Response("".join(json.dumps(row) + "\n" for row in shown), media_type=NDJSON)
    has_more = query.max_points is None and len(rows) > query.limit
    # Thousands of numbers, checked when they were stored: encoded without validating each again.
    answer = {"object": "job.metrics", "job_id": job.id, "data": shown, "has_more": has_more}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _rows(metrics: MetricSeries, job: str, query: MetricsQuery) -> list[MetricRow]:
    """With one more than is shown, if there is one."""
    limit = None if query.max_points is not None else query.limit + 1
    rows = await metrics.read(job, query.from_step, limit)
    if query.names is None:
        return rows
    wanted = [name.strip() for name in query.names.split(",")]
    if len(rows) == limit and not all(_matching(name, _names(rows)) for name in wanted):
        rows = await metrics.read(job, query.from_step)  # perhaps only later steps have it
    return _only(wanted, rows)


def downsample(rows: Sequence[MetricRow], max_points: int) -> list[Bucket]:
    """Neighbours put together into at most ``max_points`` rows of about equally many steps.

    The newest step stays alone, so that what is shown as the newest number is one; a single row holds all steps.
    """
    count = min(max_points, len(rows))
    if count < 2:
        return [_bucket(rows)] if rows else []
    edges = [round(number * (len(rows) - 1) / (count - 1)) for number in range(count)]
    return [_bucket(rows[begin:end]) for begin, end in pairwise([*edges, len(rows)])]


def _bucket(rows: Sequence[MetricRow]) -> Bucket:
    if len(rows) == 1:
        alone = {name: value for name, value in rows[0].items() if name != "step"}
        return {"step": rows[0]["step"], "count": 1, **alone, "low": alone, "high": alone}
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                values.setdefault(name, []).append(value)
    means = {name: sum(several) / len(several) for name, several in values.items()}
    low = {name: min(several) for name, several in values.items()}
    high = {name: max(several) for name, several in values.items()}
    return {"step": rows[-1]["step"], "count": len(rows), **means, "low": low, "high": high}


def _as_csv(rows: Sequence[Bucket]) -> str:
    """One column per name, extremes included; empty where a step has no value."""
    flat = [_flat(row) for row in rows]
    names = sorted({name for row in flat for name in row} - {"step"})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *names], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Bucket) -> MetricRow:
    flat: MetricRow = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{inner}:{name}": extreme for inner, extreme in value.items()}
        else:
            flat[name] = value
    return flat


def _only(wanted: list[str], rows: list[MetricRow]) -> list[MetricRow]:
    known = _names(rows)
    names: set[str] = set()
    for one in wanted:
        found = _matching(one, known)
        # A job without rows has no names yet; asking early is no mistake.
        if known and not found:
            raise RequestRefused(
                400, "unknown_metric", f"{one} is not a metric of this job{near(one, known)}", param="names"
            )
        names |= found
    return [{name: value for name, value in row.items() if name == "step" or name in names} for row in rows]


def _names(rows: Sequence[MetricRow]) -> set[str]:
    return {name for row in rows for name in row} - {"step"}


def _matching(wanted: str, known: Collection[str]) -> set[str]:
    return {name for name in known if name == wanted or (wanted.endswith("*") and name.startswith(wanted[:-1]))}
