"""What happened to a job: as a page, or as a stream that goes on until the job is over."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Header, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from services.api.http import sse
from services.api.http.context import ContextOf
from services.api.http.errors import RequestRefused
from services.api.http.routers import v1_router
from services.api.http.streams import BoundedStream
from services.api.views.store_views import EventView, Page, event_view, page
from services.state.store import JobEvent, Store

router = v1_router("events", "/jobs/{id}/events")

CHUNK = 1000

# Checked before a stream begins: afterwards the status of the answer is sent.
_POSITION = re.compile(r"[0-9]{1,16}(-[0-9]{1,16})?")


class EventQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    after: str | None = None
    """Id of the event before the first one wanted; `0` for all that are kept."""
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    """Length of a page; a stream has no end until the job has."""
    types: str | None = None
    """Only events of these types, comma-separated. For pages; a stream brings everything."""


@router.get(
    "",
    response_model=Page[EventView],
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def read_events(
    id: str,
    query: Annotated[EventQuery, Query()],
    context: ContextOf,
    accept: Annotated[str, Header()] = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> Page[EventView] | Response:
    """A page of events, or with `Accept: text/event-stream` all from a position on, live.

    A stream is resumed after `Last-Event-ID` (which wins) or `after`. Without either it begins with the newest status.
    """
    job = await context.store.jobs.get(id)
    position = last_event_id if last_event_id is not None else query.after
    check_position(position)
    if "text/event-stream" not in accept.lower():
        types = None if query.types is None else frozenset(query.types.split(","))
        events = await _page(context.store, job.id, position or sse.BEGINNING, query.limit + 1, types)
        return page([event_view(event) for event in events], query.limit)
    stream = sse.EventStream(
        context.store, context.tails, job.id, context.stopping, context.clock, ping_s=context.ping_s
    )
    return BoundedStream(stream.frames(position), media_type="text/event-stream", headers=sse.HEADERS)


def check_position(position: str | None) -> str | None:
    """The position itself; raises RequestRefused if it is not one."""
    if position is not None and not _POSITION.fullmatch(position):
        raise RequestRefused(400, "invalid_cursor", f"{position[:80]!r} is not an event id", param="after")
    return position


async def _page(store: Store, job: str, after: str, count: int, types: frozenset[str] | None) -> list[JobEvent]:
    if types is None:
        return await store.events.read(job, after, count=count)
    found: list[JobEvent] = []
    # The number of events that are kept is bounded, and so is the number of rounds.
    while len(found) < count and (events := await store.events.read(job, after, count=CHUNK)):
        found += [event for event in events if event.type in types]
        after = events[-1].id
    return found[:count]
