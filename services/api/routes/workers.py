"""The processes that work on jobs."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import quote

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from services.api.http.context import ContextOf
from services.api.http.errors import FINAL, RequestRefused, documented
from services.api.http.listing import after_id
from services.api.http.presence import RegisteredProcess, Role
from services.api.http.routers import v1_router
from services.api.views.store_views import Page, View, page

router = v1_router("workers", "/workers")


class WorkerView(View):
    """A process: the fields that it registered with, and these."""

    model_config = ConfigDict(extra="allow")

    object: Literal["worker"] = "worker"
    id: str
    role: Role
    alive: bool
    draining: bool
    """It was asked to leave, or, for an engine, to take no more work."""
    links: dict[str, str]
    """`drain`: where to ask it, while it is alive."""


class DrainView(View):
    """A process that was asked to drain."""

    object: Literal["worker.drain"] = "worker.drain"
    id: str
    alive: bool
    """False when it has left."""


class WorkerQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=1000)] = 1000
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""


@router.get("")
async def list_workers(query: Annotated[WorkerQuery, Query()], context: ContextOf) -> Page[WorkerView]:
    """Registered trainers, rollout workers and engines by role and id; `alive` says whether one still beats.

    `links.drain` asks a process to leave, or an engine to take no more work; `draining` says that it was asked.
    """
    asked = await context.drains.all_asked()
    members = await context.presence.members()
    return page([_shown(one, asked) for one in after_id(members, query.after, query.limit)], query.limit)


def _shown(one: RegisteredProcess, asked: set[str]) -> WorkerView:
    """Flat: the report of an engine's trainer stands among the fields of the engine."""
    shown = msgspec.to_builtins(one.record)
    shown |= shown.pop("report", None) or {}
    kind = "engines" if one.role == "engine" else "workers"
    links = {"drain": f"/v1/{kind}/{quote(one.id, safe='')}/drain"} if one.is_alive else {}
    is_draining = one.draining or one.id in asked
    named = {"role": one.role, "alive": one.is_alive, "draining": is_draining, "links": links}
    return WorkerView.model_validate(shown | named)


@router.post("/{worker}/drain", status_code=202, responses=documented(409))
async def drain(worker: str, context: ContextOf) -> DrainView:
    """Ask a process to leave. A rollout worker takes no more episodes, hands back what it holds, and ends. A trainer
    ends the step that it is in, saves it, hands its job back for another one to go on with, and ends."""
    found = next((one for one in await context.presence.members() if one.id == worker), None)
    if found is None:
        raise RequestRefused(404, "worker_not_found", f"no process {worker[:80]!r} is registered", param="worker")
    if found.role == "engine":
        message = f"{worker} is an engine: it is drained by POST /v1/engines/{{engine}}/drain"
        raise RequestRefused(409, "cannot_drain", message, headers=FINAL)
    if found.is_alive:
        await context.drains.ask(worker)
    return DrainView(id=worker, alive=found.is_alive)
