"""A job's events as server-sent events, resumed exactly where a client was cut.

One rule: a client's position is the last id that it saw and is kept nowhere else, so any API process can take over from
any other: no gap, no duplicate. A slow client reads at its own position and holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from services.api.views.event_tails import EventTail, EventTails
from services.state.client import Away
from services.state.store import JobEvent, Store

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
RETRY_MS = 2000
PING_S = 15.0
BATCH = 200
BEGINNING = "0"


class EventStream:
    """Frames for one client."""

    def __init__(
        self,
        store: Store,
        tails: EventTails,
        job: str,
        stopping: asyncio.Event,
        clock: Callable[[], float],
        *,
        ping_s: float = PING_S,
    ) -> None:
        self._store = store
        self._tails = tails
        self._job = job
        self._stopping = stopping
        self._clock = clock
        self._ping_s = ping_s

    async def frames(self, after: str | None) -> AsyncIterator[bytes]:
        """From the first event after `after`; without it, the newest status and then what happens from now on."""
        yield b"retry: %d\n\n" % RETRY_MS
        # The status of the answer is sent by now. A client that is cut reconnects by itself and then sees the error.
        with contextlib.suppress(Away):
            if after is None:
                newest = await self._newest_status()
                if newest is not None:
                    yield render(newest)
                after = newest.id if newest else BEGINNING
            async for piece in self._follow(after):
                yield piece

    async def _follow(self, after: str) -> AsyncIterator[bytes]:
        quiet_since = self._clock()
        with self._tails.of(self._job, after) as tail:
            over, may_be_news = await self._is_over(), True
            while not self._stopping.is_set():
                generation, over = tail.generation, over or tail.is_over
                frames, after = await self._next(tail, after, over) if may_be_news else (b"", after)
                if frames:
                    # In one piece: a client that hangs up midway costs one failed write, not hundreds.
                    yield frames
                    quiet_since = self._clock()
                    continue
                # The last status is written together with the state, so every earlier event could be read by now.
                if over and may_be_news:
                    yield frame("end", {})
                    return
                silent_s = self._clock() - quiet_since
                if silent_s >= self._ping_s:
                    quiet_since, silent_s = self._clock(), 0.0
                    yield b": ping\n\n"
                may_be_news = await tail.changed(generation, self._ping_s - silent_s)

    async def _next(self, tail: EventTail, after: str, over: bool) -> tuple[bytes, str]:
        """The frames after a position, and the position behind them. Once a job is over, Redis has the last word:
        the tail may not have reached the end."""
        held = None if over else tail.since(after)
        if held is not None:
            return held
        events = await self._store.events.read(self._job, after, count=BATCH)
        return b"".join(render(event) for event in events), events[-1].id if events else after

    async def _is_over(self) -> bool:
        return (await self._store.jobs.get(self._job)).status.is_terminal

    async def _newest_status(self) -> JobEvent | None:
        """The newest status under the id of the newest event: what a client has seen when it has seen this."""
        status, last, after = None, None, BEGINNING
        while events := await self._store.events.read(self._job, after, count=1000):
            last = events[-1]
            after = last.id
            status = next((event for event in reversed(events) if event.type == "job.status"), status)
        if status is None or last is None:
            return None
        return JobEvent(last.id, status.type, status.created_at, status.data)


def render(event: JobEvent) -> bytes:
    """An event on the wire."""
    return frame(event.type, event.data, event.id)


def frame(kind: str, data: Mapping[str, Any], event_id: str | None = None) -> bytes:
    """JSON has no bare line ends, so the data is one line."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
