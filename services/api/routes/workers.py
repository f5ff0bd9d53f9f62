"""The processes that work on jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec
from fastapi import Query, Request
from pydantic import BaseModel, ConfigDict, Field

from gspo_core.versions import EngineLabel
from services.api.http.access import Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import FINAL, RequestRefused, documented
from services.api.http.listing import after_id
from services.api.http.presence import RegisteredProcess, Role
from services.api.http.routers import v1_router
from services.api.views.store_views import Page, View, page
from services.state.fleet_records import EngineRecord, WorkerRecord
from services.state.keys import InvalidJobId
from services.state.store import JobNotFound

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
async def list_workers(
    query: Annotated[WorkerQuery, Query()], request: Request, context: ContextOf
) -> Page[WorkerView]:
    """Registered trainers, rollout workers and engines by role and id; `alive` says whether one still beats. Only
    admins see what they do for the jobs of others.

    `links.drain` asks a process to leave, or an engine to take no more work; `draining` says that it was asked.
    """
    asked = await context.drains.all_asked()
    members = after_id(await context.presence.members(), query.after, query.limit)
    unseen = await _unseen(members, context, request.scope["caller"])
    return page([_shown(_without(one, unseen), asked) for one in members], query.limit)


async def _unseen(members: Iterable[RegisteredProcess], context: ApiContext, caller: Caller) -> set[str]:
    """The jobs that they name and the caller may not see."""
    if caller.is_admin:
        return set()
    named = {job for one in members for job in _jobs_of(one)}
    seen = set[str]()
    for job in named:
        with contextlib.suppress(JobNotFound, InvalidJobId):
            if caller.sees((await context.store.jobs.get(job)).owner):
                seen.add(job)
    return named - seen


def _jobs_of(one: RegisteredProcess) -> set[str]:
    match one.record:
        case WorkerRecord() as record:
            return {*record.jobs, *record.environment_capacity, *record.ill_environments}
        case EngineRecord() as record:
            held = (EngineLabel.parse_or_none(text) for text in (record.label, record.weight_version or ""))
            return {one.job for one in held if one is not None} | ({record.job} if record.job else set())
    return set()


def _without(one: RegisteredProcess, jobs: set[str]) -> RegisteredProcess:
    """What it says of these jobs is left out; of an engine that serves or served one, what it holds."""
    mine = _jobs_of(one) - jobs
    if not _jobs_of(one) & jobs:
        return one
    match one.record:
        case WorkerRecord() as record:
            return replace(
                one,
                record=msgspec.structs.replace(
                    record,
                    jobs=tuple(job for job in record.jobs if job in mine),
                    environment_capacity={job: n for job, n in record.environment_capacity.items() if job in mine},
                    ill_environments={job: ill for job, ill in record.ill_environments.items() if job in mine},
                ),
            )
        case EngineRecord() as record:
            is_mine = record.job in mine
            label = EngineLabel.parse_or_none(record.label)
            report = record.report and msgspec.structs.replace(
                record.report,
                label=record.report.label if label is None or label.job in mine else "",
                reason=record.report.reason if is_mine else "",
            )
            job = record.job if is_mine else None
            bare = msgspec.structs.replace(record, job=job, report=report, model_path=None, weight_version=None)
            return replace(one, record=bare)
    return one


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
