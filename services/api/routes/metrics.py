"""The numbers of a job, step by step: as JSON, CSV or NDJSON, all of them or as many points as a picture needs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gspo_core.problems import near
from services.api.http.context import ContextOf
from services.api.http.errors import RequestRefused
from services.api.http.requests import StrictRoute
from services.api.views.store_views import MetricsView

router = APIRouter(prefix="/jobs/{id}/metrics", tags=["metrics"], route_class=StrictRoute)

CSV, NDJSON = "text/csv", "application/x-ndjson"
_TEXT = {"schema": {"type": "string"}}


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
    last `step` of them, their `count`, for each name the mean, and under `low` and `high` the extremes."""


@router.get("", response_model=MetricsView, responses={200: {"content": {CSV: _TEXT, NDJSON: _TEXT}}})
async def read_metrics(
    id: str, query: Annotated[MetricsQuery, Query()], context: ContextOf, accept: Annotated[str, Header()] = ""
) -> Response:
    """Metrics from a step on. `Accept: text/csv` or `application/x-ndjson` gives a file instead."""
    job = await context.store.jobs.get(id)
    rows = await context.store.metrics.read(job.id, query.from_step)
    if query.names is not None:
        rows = _only([name.strip() for name in query.names.split(",")], rows)
    shown = rows[: query.limit] if query.max_points is None else downsample(rows, query.max_points)
    if CSV in accept.lower():
        return Response(_as_csv(shown), media_type=CSV)
    if NDJSON in accept.lower():
        return Response("".join(json.dumps(row) + "\n" for row in shown), media_type=NDJSON)
    has_more = query.max_points is None and len(rows) > query.limit
    # Numbers by the thousand, already checked when they were stored: written out without looking at each once more.
    answer = {"object": "job.metrics", "job_id": job.id, "data": shown, "has_more": has_more}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def downsample(rows: Sequence[dict[str, Any]], max_points: int) -> list[dict[str, Any]]:
    """Neighbours put together into at most ``max_points`` rows of about equally many steps."""
    count = min(max_points, len(rows))
    edges = [round(number * len(rows) / count) for number in range(count + 1)] if count else []
    return [_bucket(rows[begin:end]) for begin, end in pairwise(edges)]


def _bucket(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def _as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One column per name; a step without a value of that name has an empty field. Extremes get columns."""
    flat = [_flat(row) for row in rows]
    names = sorted({name for row in flat for name in row} - {"step"})
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *names], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    extremes = {f"{name}:{end}": value for end in ("low", "high") for name, value in row.get(end, {}).items()}
    return {name: value for name, value in row.items() if name not in ("low", "high")} | extremes


def _only(wanted: list[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {name for row in rows for name in row} - {"step"}
    names: set[str] = set()
    for one in wanted:
        found = {name for name in known if name == one or (one.endswith("*") and name.startswith(one[:-1]))}
        # A job without rows yet has no names at all; asking early is no mistake.
        if known and not found:
            raise RequestRefused(
                400, "unknown_metric", f"{one} is no metric of this job{near(one, known)}", param="names"
            )
        names |= found
    return [{name: value for name, value in row.items() if name == "step" or name in names} for row in rows]
