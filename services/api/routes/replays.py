"""Replays: trained steps are trained again and compared, as they were or otherwise."""

from __future__ import annotations

import asyncio
from typing import Annotated, Self

from fastapi import Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from gspo_core.json_value import JSON
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused, documented
from services.api.http.listing import after_id
from services.api.http.routers import v1_router
from services.api.views.replay_views import ReplayDetail, ReplayPlan, ReplayView, Status, replay_detail, replay_view
from services.api.views.replays import now
from services.api.views.store_views import Page, page
from services.files.job_dir import JobDir
from services.files.replays import AskedReplay, Replays, replay_id

router = v1_router("replays", "/jobs/{id}/replays")

RETRY_AFTER_S = 30
Name = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]
Step = Annotated[int, Field(ge=1, le=2**53)]
Text = Annotated[str, Field(min_length=1, max_length=256)]


class ReplayRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    first: Step
    """The first step to train again."""
    last: Step | None = None
    """The last one. Left out: `first` alone."""
    set: dict[str, JsonValue] = Field(default_factory=dict)
    """What would these steps have led to with other settings? By key: `{"objective.name": "cispo"}`."""
    without: Annotated[list[Text], Field(max_length=1000)] = Field(default_factory=list)
    """Without groups (`"349"`), episodes (`"349/2"`) or parts of the reward (by name)."""
    single: Annotated[str, Field(pattern=r"^[0-9]{1,18}/[0-9]{1,18}$")] | None = None
    """`GROUP/MEMBER` of an episode whose tokens are to be shown in the loss of its step."""
    influence: bool = False
    """Train the steps once more for each of their groups, with its advantages 0, and rank them."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.last is not None and self.last < self.first:
            raise ValueError("last: the last step is not before the first")
        return self


class ReplayQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    dry_run: bool = False
    """Say what it takes; begin nothing."""


class ReplaysQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""


@router.post(
    "",
    status_code=202,
    response_model=ReplayView,
    responses={
        200: {"model": ReplayPlan, "description": "What it would take (`dry_run=true`)"},
        **documented(409, 413, 415),
    },
)
async def begin_replay(
    id: str, wanted: ReplayRequest, query: Annotated[ReplayQuery, Query()], response: Response, context: ContextOf
) -> ReplayView | Response:
    """Train steps of the job again and compare them with what was published, as they were or otherwise. The same
    question about the same past is one replay; the replay says when it is `done`."""
    from gspo_core.replay.question import ReplayQuestion  # few requests need it
    from services.api.submission import replaying

    await context.store.jobs.get(id)
    job = context.history.job_dir(id)
    record = wanted.model_dump(mode="json") | {"last": wanted.last or wanted.first}
    plan = await replaying.planned(job, ReplayQuestion.of(record))
    start = None if plan.start is None else plan.start.step
    takes = ReplayPlan(from_checkpoint=start, replayed_steps=plan.replayed, trained_steps=plan.trained)
    if query.dry_run:
        return Response(takes.model_dump_json(), media_type="application/json")
    name = replay_id(record, {"epochs": list(plan.epochs)})
    asked: dict[str, JSON] = {
        "question": record,
        "plan": takes.model_dump(mode="json", exclude={"object"}),
        "created_at": now(),
    }
    found = await _begin(context, job, name, asked)
    response.headers["Location"] = f"/v1/jobs/{id}/replays/{name}"
    return await asyncio.to_thread(_view, context, job, found)


@router.get("")
async def list_replays(id: str, query: Annotated[ReplaysQuery, Query()], context: ContextOf) -> Page[ReplayView]:
    """What was asked of the job's steps, the newest first."""
    await context.store.jobs.get(id)
    job = context.history.job_dir(id)
    return await asyncio.to_thread(_page, context, job, query)


@router.get("/{replay}")
async def get_replay(id: str, replay: Name, context: ContextOf) -> ReplayDetail:
    """One replay, with its answer once it is `done`."""
    await context.store.jobs.get(id)
    job = context.history.job_dir(id)
    return await asyncio.to_thread(_detail, context, job, replay)


@router.delete("/{replay}", status_code=204)
async def remove_replay(id: str, replay: Name, context: ContextOf) -> None:
    """Remove a question and its answer; one that this process works on is stopped."""
    await context.store.jobs.get(id)
    job = context.history.job_dir(id)
    await asyncio.to_thread(_found, job, replay)
    await context.replays.stop(job, replay)
    await asyncio.to_thread(Replays(job).remove, replay)


async def _begin(context: ApiContext, job: JobDir, name: str, asked: dict[str, JSON]) -> AskedReplay:
    store = Replays(job)
    found = await asyncio.to_thread(store.read, name)
    if found is not None and found.answered is not None and "answer" in found.answered:
        return found
    if context.replays.is_full:
        message = "too many replays wait for their turn here; ask again when one is over"
        raise RequestRefused(429, "too_many_replays", message, headers={"Retry-After": str(RETRY_AFTER_S)})
    if found is not None and found.answered is not None:  # it failed
        await asyncio.to_thread(store.forget_answer, name)
    await asyncio.to_thread(store.ask, name, asked)
    found = await asyncio.to_thread(_found, job, name)
    context.replays.begin(job, found)
    return found


def _found(job: JobDir, name: str) -> AskedReplay:
    found = Replays(job).read(name)
    if found is None:
        raise RequestRefused(404, "replay_not_found", f"{job.id} has no replay {name}")
    return found


def _view(context: ApiContext, job: JobDir, found: AskedReplay) -> ReplayView:
    found, status, said = _looked_at(context, job, found)
    return replay_view(job.id, found, status=status, said=said)


def _detail(context: ApiContext, job: JobDir, name: str) -> ReplayDetail:
    found, status, said = _looked_at(context, job, _found(job, name))
    return replay_detail(job.id, found, status=status, said=said)


def _looked_at(context: ApiContext, job: JobDir, found: AskedReplay) -> tuple[AskedReplay, Status, list[str] | None]:
    """With its status and what is said of it. Its work ends a moment after its answer is there."""
    work = context.replays
    status = work.status(job, found)
    if status == "interrupted" and (again := Replays(job).read(found.id)) is not None:
        found, status = again, work.status(job, again)  # it was answered since it was read
    return found, status, None if found.answered is not None else work.said(job, found.id)


def _page(context: ApiContext, job: JobDir, query: ReplaysQuery) -> Page[ReplayView]:
    store = Replays(job)
    # An answer may have megabytes: those of this page alone are read.
    wanted = after_id([AskedReplay(name, {}, None) for name in store.names()], query.after, query.limit)
    found = (store.read(one.id) for one in wanted)
    return page([_view(context, job, one) for one in found if one is not None], query.limit)
