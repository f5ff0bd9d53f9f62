"""Keys that talk to a job's policy without an episode, and what they said: made, listed, read, erased.

Rule: a key's secret is shown once. What was recorded is shown as it was sampled, and erased for good: by trace, by
user, or by key.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Path, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from gspo_core.codec import SegmentRejected, decode
from gspo_core.log.transcript import by_branch, tokens_view, turns_view
from gspo_core.types import Segment
from services.api.http import audit
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import FINAL, RequestRefused, documented
from services.api.http.listing import after_id
from services.api.http.routers import v1_router
from services.api.http.streams import BoundedStream
from services.api.views.store_views import Page, View, page
from services.state.jobs import JobRecord
from services.state.talks import Entry, TalkKeyRecord, Talks

router = v1_router("traffic", "/jobs/{id}")

DAY_S = 86_400.0
NDJSON = "application/x-ndjson"
TraceNumber = Annotated[int, Path(ge=0, le=2**53)]
KeyId = Annotated[str, Path(pattern=r"^[0-9a-f]{12}$")]


class TalkKeyQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    label: Annotated[str, Field(max_length=64)] = ""
    """What it is for, in words of yours."""
    days: Annotated[FiniteFloat, Field(gt=0, le=3650)] | None = None
    """How long it is valid; left out: until it is revoked."""
    turns: Annotated[int, Field(gt=0, le=2**53)] | None = None
    """The most requests that it may make; left out: no limit."""
    tokens: Annotated[int, Field(gt=0, le=2**53)] | None = None
    """After so many sampled tokens no further turn is begun."""
    seconds: Annotated[FiniteFloat, Field(gt=0, le=2**40)] | None = None
    """After so many seconds of sampling no further turn is begun."""


class TraceQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""
    user: str | None = None
    """Only those of this user."""
    key: str | None = None
    """Only those of this key, by its id."""


class TraceDetailQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    include: Literal["tokens"] | None = None
    """`tokens`: every token with its text, log-prob and version."""


class EraseQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    user: Annotated[str, Field(min_length=1, max_length=256)]
    """Whose traffic is erased, as requests name them (`user`, `safety_identifier`, `metadata.user_id`)."""


class TalkKeyView(View):
    """A key that talks without an episode, without its secret."""

    object: Literal["talk_key"] = "talk_key"
    id: str
    job_id: str
    label: str
    created_at: str
    expires_at: str | None
    max_turns: int | None
    max_tokens: int | None
    max_seconds: float | None
    num_turns: int
    num_tokens: int
    seconds: float


class NewTalkKeyView(TalkKeyView):
    key: str
    """What to send to the gateway as a key of OpenAI or Anthropic. It cannot be shown again."""


class TraceView(View):
    """A conversation of such a key."""

    object: Literal["trace"] = "trace"
    id: str
    job_id: str
    key: str
    user: str
    began_at: str
    is_redacted: bool
    """Its turns are texts that went through `GSPO_TRAFFIC_REDACTOR`: `read` and `said`, without tokens."""
    num_turns: int
    num_branches: int
    num_tokens: int
    num_sampled: int
    versions: list[int]


class TraceDetail(TraceView):
    turns: list[dict[str, Any]]
    tokens: dict[str, Any] | None = None
    warning: str | None = None


class Erased(View):
    object: Literal["traffic.erased"] = "traffic.erased"
    num_segments: int


@router.post("/talk_keys", status_code=201, responses=documented(409))
async def make_talk_key(
    id: str, query: Annotated[TalkKeyQuery, Query()], response: Response, context: ContextOf
) -> NewTalkKeyView:
    """Make a key that talks to the newest weights of a job, as long as the job runs. What it says is recorded, and not
    trained."""
    job = await context.store.jobs.get(id)
    if job.status.is_terminal:
        raise RequestRefused(409, "job_over", f"{id} is over: nothing answers its keys", headers=FINAL)
    now = time.time()
    given = TalkKeyRecord(
        id=secrets.token_hex(6),
        label=query.label,
        created_at=_moment(now),
        expires_at=None if query.days is None else now + query.days * DAY_S,
        max_turns=query.turns,
        max_tokens=query.tokens,
        max_seconds=query.seconds,
    )
    key = await _talks(context).make(job.id, given)
    audit.changed("talk key", given.id, new={"job": job.id, "label": given.label, "expires_at": given.expires_at})
    response.headers["Cache-Control"] = "no-store"
    return NewTalkKeyView(**dict(_key_view(job.id, given)), key=key)


@router.get("/talk_keys")
async def list_talk_keys(id: str, context: ContextOf) -> Page[TalkKeyView]:
    """The keys that were not revoked, the oldest first, with what they have used."""
    job = await context.store.jobs.get(id)
    keys = [_key_view(job.id, one) for one in await _talks(context).all(job.id)]
    return page(keys, max(len(keys), 1))


@router.delete("/talk_keys/{key}", status_code=204)
async def revoke_talk_key(id: str, key: KeyId, context: ContextOf) -> None:
    """Revoke a key, by its id: its next request is refused. What it said stays until it is erased."""
    if not await _talks(context).revoke(id, key):
        raise RequestRefused(404, "key_not_found", "this job has no such key", param="key")
    audit.changed("talk key", key, old={"job": id})


@router.get("/traces")
async def list_traces(id: str, query: Annotated[TraceQuery, Query()], context: ContextOf) -> Page[TraceView]:
    """Recorded conversations, the newest first."""
    job = await context.store.jobs.get(id)
    found = [one async for one in _traces(context, job) if query.user in (None, one[0].user)]
    found = [one for one in found if query.key in (None, one[0].key)][::-1]
    views = await asyncio.to_thread(lambda: [_trace_view(job, one) for one in found])
    return page(after_id(views, query.after, query.limit), query.limit)


@router.get("/traces.ndjson", response_class=StreamingResponse)
async def download_traces(id: str, context: ContextOf) -> StreamingResponse:
    """All recorded conversations with every token, one JSON object a line, the oldest first."""
    job = await context.store.jobs.get(id)

    async def lines() -> AsyncIterator[str]:
        async for entries in _traces(context, job):
            yield (await asyncio.to_thread(_detail, context, job, entries, True)).model_dump_json() + "\n"

    return BoundedStream(lines(), media_type=NDJSON)


@router.get("/traces/{trace}")
async def get_trace(
    id: str, trace: TraceNumber, query: Annotated[TraceDetailQuery, Query()], context: ContextOf
) -> TraceDetail:
    """One conversation turn by turn."""
    job = await context.store.jobs.get(id)
    async for entries in _traces(context, job):
        if entries[0].trace == trace:
            return await asyncio.to_thread(_detail, context, job, entries, query.include == "tokens")
    raise _no_trace()


@router.delete("/traces/{trace}")
async def erase_trace(id: str, trace: TraceNumber, context: ContextOf) -> Erased:
    """Erase one conversation for good."""
    job = await context.store.jobs.get(id)
    return Erased(num_segments=await _talks(context).erase(job.id, "t", str(trace)))


@router.delete("/traces")
async def erase_traces(id: str, query: Annotated[EraseQuery, Query()], context: ContextOf) -> Erased:
    """Erase all that one user said and was told with such keys."""
    job = await context.store.jobs.get(id)
    return Erased(num_segments=await _talks(context).erase(job.id, "u", query.user))


def _talks(context: ApiContext) -> Talks:
    return Talks(context.functions)


def _no_trace() -> RequestRefused:
    return RequestRefused(404, "trace_not_found", "no such conversation is kept", param="trace")


async def _traces(context: ApiContext, job: JobRecord) -> AsyncIterator[Sequence[Entry]]:
    """The entries of each conversation. All of them are read: they are bounded by what is kept."""
    by_trace: dict[int, list[Entry]] = {}
    after = "-"
    while entries := await _talks(context).traffic(job.id, after):
        after = entries[-1].id
        for entry in entries:
            by_trace.setdefault(entry.trace, []).append(entry)
    for found in by_trace.values():
        yield found


def _redacted(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [json.loads(entry.payload) for entry in entries if entry.payload.startswith(b"{")]


def _segments(entries: Sequence[Entry]) -> list[Segment]:
    try:
        return [decode(entry.payload) for entry in entries if not entry.payload.startswith(b"{")]
    except SegmentRejected:  # of another release, or its beginning was the oldest and is gone
        return []


def _trace_view(job: JobRecord, entries: Sequence[Entry]) -> TraceView:
    segments, first = _segments(entries), entries[0]
    turns = _redacted(entries)
    return TraceView(
        id=str(first.trace),
        job_id=job.id,
        key=first.key,
        user=first.user,
        began_at=_moment(first.at_ms / 1000),
        is_redacted=bool(turns),
        num_turns=len({one.turn for one in segments} | {one["turn"] for one in turns}),
        num_branches=len({one.branch for one in segments} | {one["branch"] for one in turns}),
        num_tokens=sum(one.num_tokens for one in segments) + sum(one["num_tokens"] for one in turns),
        num_sampled=sum(one.num_actions for one in segments) + sum(one["num_sampled"] for one in turns),
        versions=sorted({one.version for one in segments}.union(*(one["versions"] for one in turns))),
    )


def _detail(context: ApiContext, job: JobRecord, entries: Sequence[Entry], with_tokens: bool) -> TraceDetail:
    segments = by_branch(_segments(entries))
    codec, warning = context.codecs.of(job)
    tokens = tokens_view(segments, None if codec is None else codec.tokenizer) if with_tokens else None
    turns = json.loads(json.dumps(turns_view(segments, codec, None), default=str)) + _redacted(entries)
    return TraceDetail(
        **dict(_trace_view(job, entries)),
        turns=turns,
        tokens=None if tokens is None else dict(tokens),
        warning=warning,
    )


def _key_view(job: str, key: TalkKeyRecord) -> TalkKeyView:
    return TalkKeyView(
        id=key.id,
        job_id=job,
        label=key.label,
        created_at=key.created_at,
        expires_at=None if key.expires_at is None else _moment(key.expires_at),
        max_turns=key.max_turns,
        max_tokens=key.max_tokens,
        max_seconds=key.max_seconds,
        num_turns=key.num_turns,
        num_tokens=key.num_tokens,
        seconds=key.seconds,
    )


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
