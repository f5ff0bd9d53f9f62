"""Groups and episodes: open ones live from the queue, trained ones from the batch logs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import Header, Path, Query
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from starlette.responses import Response, StreamingResponse

from gspo_core.codec import SegmentRejected, decode
from gspo_core.invariants import MAX_COUNT
from gspo_core.log.transcript import arrivals, by_branch, spent_view, tokens_view, turns_view
from gspo_core.messages import ToolSchema
from gspo_core.position import Position
from gspo_core.types import NOTHING, EpisodeKey, Segment
from services.api.http import sse
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import RequestRefused
from services.api.http.routers import v1_router
from services.api.http.stored_specs import readable_spec
from services.api.http.streams import BoundedStream
from services.api.views.episode_views import (
    EpisodeDetail,
    EpisodeSummary,
    GroupSummary,
    evidence_view,
    open_episode,
    open_group,
    trained_groups,
)
from services.api.views.history import EpisodeForgotten, EpisodeNotKept
from services.api.views.store_views import Page, View, page
from services.files.batch_log import BatchLogNotFound, DamagedBatchLog, LoggedBatch
from services.state.jobs import JobRecord
from services.state.queue import EpisodeView, GroupView, Stage

router = v1_router("episodes")

Item = TypeVar("Item", GroupSummary, EpisodeSummary)

NDJSON = "application/x-ndjson"
ERASED = "this episode was erased: its tokens and log-probs are gone"
# Looks at an episode that is settled, or begins anew, between the two reads of a look.
MAX_LOOKS = 3
# A search goes back this far; `step` reaches every step.
MAX_STEPS_SEARCHED = 500
GroupNumber = Annotated[int, Path(ge=0, le=2**53)]
MemberNumber = Annotated[int, Path(ge=0, le=MAX_COUNT)]


class _Query(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""


class GroupQuery(_Query):
    status: Literal["open", "trained"] = "trained"
    """`open`: dispatched and not settled, by number. `trained`: the newest step first."""
    step: Annotated[int, Field(ge=0)] | None = None
    """Only groups that this step trained."""


class EpisodeQuery(_Query):
    step: Annotated[int, Field(ge=0)] | None = None
    """Only of this step; left out, the newest five hundred steps are searched, the newest first."""
    stop_reason: str | None = None
    """Only episodes that ended so."""
    min_reward: FiniteFloat | None = None
    """Only episodes with at least this reward."""
    max_reward: FiniteFloat | None = None
    """Only episodes with at most this reward."""
    version: Annotated[int, Field(ge=0)] | None = None
    """Only episodes with tokens of this version."""
    user: str | None = None
    """Only episodes with a turn that was asked for in this name."""


class ExportQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    from_step: Annotated[int, Field(ge=0, le=2**53)] = 0
    """The first step wanted."""
    to_step: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """The last step wanted."""
    include: Literal["tokens"] | None = None
    """`tokens`: every token with its text, log-prob and version."""


class EpisodeEventView(View):
    """Something that happened in an episode: a `turn`, another `attempt`, its `outcome`."""

    object: Literal["episode.event"] = "episode.event"
    id: str
    """Resume after it; empty for the outcome, which is told again."""
    type: str
    data: dict[str, Any]


class DetailQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    include: Literal["tokens"] | None = None
    """`tokens`: every token with its text, log-prob and version."""


@router.get("/jobs/{id}/groups")
async def list_groups(id: str, query: Annotated[GroupQuery, Query()], context: ContextOf) -> Page[GroupSummary]:
    """Open groups, or trained ones."""
    job = await context.store.jobs.get(id)
    if query.status == "open":
        if query.step is not None:
            what = "open groups are of no step yet; leave it out, or ask for status=trained"
            raise RequestRefused(422, "validation_failed", what, param="step")
        after = -1 if query.after is None else _number_in(query.after, job)
        found = await context.bus.groups(job.id, after=after, limit=query.limit + 1)
        return page([open_group(job.id, one) for one in found], query.limit)
    summaries = _trained(context, job, query.step)
    groups = await asyncio.to_thread(_take, summaries, query.after, query.limit + 1)
    return page(groups, query.limit)


@router.get("/jobs/{id}/episodes")
async def list_episodes(id: str, query: Annotated[EpisodeQuery, Query()], context: ContextOf) -> Page[EpisodeSummary]:
    """Episodes that were trained, the newest step first."""
    job = await context.store.jobs.get(id)

    def matches(one: EpisodeSummary) -> bool:
        low, high = query.min_reward, query.max_reward
        return (
            (query.stop_reason is None or one.stop_reason == query.stop_reason)
            and (low is None or (one.reward is not None and one.reward >= low))
            and (high is None or (one.reward is not None and one.reward <= high))
            and (query.version is None or query.version in one.versions)
            and (query.user is None or query.user in one.users)
        )

    episodes = (one for group in _trained(context, job, query.step) for one in group.episodes)
    found = await asyncio.to_thread(_take, episodes, query.after, query.limit + 1, matches)
    return page(found, query.limit)


@router.get(
    "/jobs/{id}/episodes.jsonl",
    response_class=StreamingResponse,
    responses={200: {"content": {NDJSON: {"schema": {"type": "string"}}}, "description": "One episode per line"}},
)
async def export_episodes(id: str, query: Annotated[ExportQuery, Query()], context: ContextOf) -> Response:
    """Every episode that was trained, turn by turn, the oldest step first: one JSON object a line."""
    job = await context.store.jobs.get(id)
    tools = await _sole_tools(context, job)
    return BoundedStream(_lines(context, job, tools, query), media_type=NDJSON)


@router.get("/groups/{job}/{group}")
async def get_group(job: str, group: GroupNumber, context: ContextOf) -> GroupSummary:
    """One group with its episodes."""
    record = await context.store.jobs.get(job)
    found = await _read_open(context, record, group)
    if found is not None:
        view, read = found
        return _with_rewards(open_group(record.id, view), [open_episode(*one) for one in read])
    position, _ = await asyncio.to_thread(context.history.find, record, group)
    summaries = await asyncio.to_thread(_of_batch, context, record, position)
    return next(one for one in summaries if one.group == group)


@router.get(
    "/episodes/{job}/{group}/{member}/events",
    response_model=Page[EpisodeEventView],
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def follow_episode(
    job: str,
    group: GroupNumber,
    member: MemberNumber,
    context: ContextOf,
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> Page[EpisodeEventView] | Response:
    """Its turns so far, or with `Accept: text/event-stream` turn by turn until it is over.

    A stream is resumed after `Last-Event-ID`. A turn that grows comes again; `attempt` says that it starts anew.
    """
    # few episodes are watched
    from services.api.http.episode_stream import Arrivals, EpisodeState, frames, happenings, parse_position

    after = None if last_event_id is None else parse_position(last_event_id)
    if last_event_id is not None and after is None:
        raise RequestRefused(400, "invalid_cursor", f"{last_event_id[:80]!r} is not a position", param="last-event-id")

    async def read() -> tuple[EpisodeDetail, Arrivals]:
        detail, segments = await _read(job, group, member, DetailQuery(), context)
        return detail, arrivals(segments)

    async def look() -> EpisodeState:
        view = await _open(context, await context.store.jobs.get(job), group)
        episode = view.episodes[member] if view is not None and member < len(view.episodes) else None
        return "settled" if episode is None else (episode.attempt, episode.num_segments, episode.stage)

    detail, arrived = await read()
    if "text/event-stream" not in accept.lower():
        told = happenings(detail, arrived, after)
        found = [EpisodeEventView(id=one.id, type=one.type, data={**one.data}) for one in told]
        return page(found, max(1, len(found)))
    stream = frames(read, look, context.stopping, context.clock, after, context.ping_s)
    return BoundedStream(stream, media_type="text/event-stream", headers=sse.HEADERS)


@router.get("/episodes/{job}/{group}/{member}")
async def get_episode(
    job: str, group: GroupNumber, member: MemberNumber, query: Annotated[DetailQuery, Query()], context: ContextOf
) -> EpisodeDetail:
    """One episode turn by turn, also while it runs."""
    return (await _read(job, group, member, query, context))[0]


async def _read(
    job: str, group: int, member: int, query: DetailQuery, context: ApiContext
) -> tuple[EpisodeDetail, Sequence[Segment]]:
    record = await context.store.jobs.get(job)
    found = await _read_open(context, record, group, member)
    if found is None:
        return await _trained_detail(context, record, EpisodeKey(record.id, group, member), query)
    view, read = found
    if not read:
        raise EpisodeNotKept(EpisodeKey(record.id, group, member))
    one, segments = read[0]
    tools = await _tools(context, record, view.environment)
    base = open_group(record.id, view)
    detail = await asyncio.to_thread(
        _detail, context, record, base, open_episode(one, segments), segments, tools, query.include == "tokens"
    )
    return detail, segments


async def _trained_detail(
    context: ApiContext, job: JobRecord, key: EpisodeKey, query: DetailQuery
) -> tuple[EpisodeDetail, Sequence[Segment]]:
    position, group = await asyncio.to_thread(context.history.find, job, key.group)
    found = [one for one in group if one.key.member == key.member]
    if not found:
        raise EpisodeNotKept(key)
    tools = await _sole_tools(context, job)
    summaries = await asyncio.to_thread(_of_batch, context, job, position)
    base = next(one for one in summaries if one.group == key.group)
    episode = next(one for one in base.episodes if one.member == key.member)
    if episode.is_erased:
        raise EpisodeForgotten(key)
    segments, with_tokens = found[0].segments, query.include == "tokens"
    known = await asyncio.to_thread(context.history.trained, job, position) if with_tokens else {}
    trained = known.get((key.group, key.member))
    shown = await asyncio.to_thread(_detail, context, job, base, episode, segments, tools, with_tokens, trained)
    return shown, segments


async def _sole_tools(context: ApiContext, job: JobRecord) -> list[ToolSchema] | None:
    """Logs do not name a group's environment, so tools are known only where the job has a single one."""
    return await _tools(context, job, 0) if len(job.spec_data.get("environments", ())) == 1 else None


async def _tools(context: ApiContext, job: JobRecord, number: int) -> list[ToolSchema] | None:
    """Those of one environment; None where they are not known: an agent names its own in each request."""
    entries: list[dict[str, object]] = job.spec_data.get("environments", [])
    if number < len(entries) and entries[number].get("agent") is not None:
        return None
    environment = await context.store.environments.get(job.id, number)
    return None if environment is None else environment.get("tools")


def _lines(context: ApiContext, job: JobRecord, tools: list[ToolSchema] | None, query: ExportQuery) -> Iterator[bytes]:
    """Blocking, batch by batch on demand: the framework takes each from a thread."""
    for position in reversed(context.history.positions(job)):
        if position.step < query.from_step or (query.to_step is not None and position.step > query.to_step):
            continue
        try:
            batch = context.history.batch(job, position)
        except (BatchLogNotFound, DamagedBatchLog):  # export whatever is readable
            continue
        trajectories = {one.key: one for group in batch.groups for one in group}
        with_tokens = query.include == "tokens"
        known = context.history.trained(job, position) if with_tokens else {}
        for group in trained_groups(job.id, batch, readable_spec(job)):
            for episode in group.episodes:
                segments = trajectories[EpisodeKey(job.id, group.group, episode.member)].segments
                trained = known.get((group.group, episode.member))
                detail = _detail(context, job, group, episode, segments, tools, with_tokens, trained)
                yield detail.model_dump_json().encode() + b"\n"


def _detail(
    context: ApiContext,
    job: JobRecord,
    group: GroupSummary,
    episode: EpisodeSummary,
    segments: tuple[Segment, ...],
    tools: list[ToolSchema] | None,
    with_tokens: bool,
    trained: NDArray[np.float32] | None = None,
) -> EpisodeDetail:
    codec, note = (None, ERASED) if episode.is_erased else context.codecs.of(job)
    shown = by_branch(segments)
    outcome = next((one.outcome for one in segments if one.outcome is not None), None)
    evidence = NOTHING if outcome is None else outcome.evidence
    return EpisodeDetail(
        **dict(episode),
        job_id=job.id,
        group=group.group,
        split=group.split,
        task_index=group.task_index,
        group_size=group.size,
        step=group.step,
        epoch=group.epoch,
        note=note,
        turns=turns_view(shown, codec, tools),
        closing=spent_view([one for one in segments if one.is_final]),
        evidence=evidence_view(evidence),
        evidence_left_out=dict(evidence.left_out),
        tokens=tokens_view(shown, None if codec is None else codec.tokenizer, trained) if with_tokens else None,
    )


def _trained(context: ApiContext, job: JobRecord, step: int | None) -> Iterator[GroupSummary]:
    """Blocking, batch by batch on demand."""
    positions = context.history.positions(job)
    wanted = positions[:MAX_STEPS_SEARCHED] if step is None else [one for one in positions if one.step == step]
    for position in wanted:
        try:
            yield from _of_batch(context, job, position)
        except DamagedBatchLog:
            if step is not None:  # a search over all steps passes over damage
                raise


def _of_batch(context: ApiContext, job: JobRecord, position: Position) -> list[GroupSummary]:
    try:
        batch: LoggedBatch = context.history.batch(job, position)
    except BatchLogNotFound:  # removed since it was listed
        return []
    return trained_groups(job.id, batch, readable_spec(job))


def _take(
    items: Iterator[Item], after: str | None, count: int, wanted: Callable[[Item], bool] = lambda _: True
) -> list[Item]:
    found: list[Item] = []
    passed = after is None
    for one in items:
        if passed and wanted(one):
            found.append(one)
            if len(found) == count:
                break
        passed = passed or one.id == after
    if not passed:
        raise _bad_cursor(after)
    return found


async def _open(context: ApiContext, job: JobRecord, group: int) -> GroupView | None:
    found = await context.bus.groups(job.id, after=group - 1, limit=1)
    return found[0] if found and found[0].group == group else None


async def _read_open(
    context: ApiContext, job: JobRecord, group: int, member: int | None = None
) -> tuple[GroupView, list[tuple[EpisodeView, tuple[Segment, ...]]]] | None:
    """A group with its episodes, or one of them, as they were at one moment each; None: it is not open."""
    view, read = None, list[tuple[EpisodeView, tuple[Segment, ...]]]()
    for _ in range(MAX_LOOKS):
        view = await _open(context, job, group)
        if view is None:
            return None
        wanted = view.episodes if member is None else view.episodes[member : member + 1]
        read = [(one, await _segments(context, one)) for one in wanted]
        if all(_is_whole(*one) for one in read):
            break
    return None if view is None else (view, read)


def _is_whole(episode: EpisodeView, segments: Sequence[Segment]) -> bool:
    """Whether it has not been settled or begun anew since it was seen so; of one that was given up, nothing is left."""
    if episode.stage is Stage.DEAD:
        return True
    has_outcome = any(one.outcome is not None for one in segments)
    is_of_attempt = all(one.attempt == episode.attempt for one in segments)
    return is_of_attempt and len(segments) >= episode.num_segments and (has_outcome or episode.stage is not Stage.DONE)


async def _segments(context: ApiContext, episode: EpisodeView) -> tuple[Segment, ...]:
    if episode.stage is Stage.QUEUED and not episode.num_segments:
        return ()
    payloads = await context.bus.read_episode(episode.key)
    try:
        return tuple(decode(payload) for payload in payloads)
    except SegmentRejected as error:
        raise RequestRefused(404, "episode_unreadable", f"{episode.key}: {error}") from None


def _with_rewards(group: GroupSummary, episodes: list[EpisodeSummary]) -> GroupSummary:
    rewards = [one.reward for one in episodes if one.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    spread = None if mean is None else (sum((one - mean) ** 2 for one in rewards) / len(rewards)) ** 0.5
    return group.model_copy(update={"episodes": episodes, "reward_mean": mean, "reward_std": spread})


def _number_in(cursor: str, job: JobRecord) -> int:
    name, _, number = cursor.rpartition("/")
    if name != job.id or not number.isdecimal() or len(number) > 16:
        raise _bad_cursor(cursor)
    return int(number)


def _bad_cursor(cursor: str | None) -> RequestRefused:
    return RequestRefused(400, "invalid_cursor", f"{str(cursor)[:80]!r} is not in this list", param="after")
