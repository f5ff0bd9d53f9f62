"""The numbers of a job, step by step."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from gspo_core.problems import near
from services.api.context import ContextOf
from services.api.errors import ApiError
from services.api.views import MetricsView

router = APIRouter(prefix="/jobs/{id}/metrics", tags=["metrics"])


class MetricsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    names: str | None = None
    """Comma-separated; each exact, or a beginning followed by `*`. Left out: all."""
    from_step: Annotated[int, Field(ge=0)] = 0
    """The first step wanted."""
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    """Rows in the answer."""


@router.get("")
async def read_metrics(id: str, query: Annotated[MetricsQuery, Query()], context: ContextOf) -> MetricsView:
    """Metrics from a step on."""
    job = await context.store.get_job(id)
    rows = await context.store.read_metrics(id, query.from_step)
    if query.names is not None:
        rows = _only([name.strip() for name in query.names.split(",")], rows)
    return MetricsView(job_id=job.id, data=rows[: query.limit], has_more=len(rows) > query.limit)


def _only(wanted: list[str], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {name for row in rows for name in row} - {"step"}
    names: set[str] = set()
    for one in wanted:
        found = {name for name in known if name == one or (one.endswith("*") and name.startswith(one[:-1]))}
        # A job without rows yet has no names at all; asking early is no mistake.
        if known and not found:
            raise ApiError(400, "unknown_metric", f"{one} is no metric of this job{near(one, known)}", param="names")
        names |= found
    return [{name: value for name, value in row.items() if name == "step" or name in names} for row in rows]
