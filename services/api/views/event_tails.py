"""One shared tail per job for all clients that follow its events in this process.

One rule: a tail holds a piece of the job's stream without holes, as bytes that are ready to be sent; a client behind
that piece reads for itself. However many clients follow a job, an event is read and rendered once. A tail ends with its
last reader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from services.state.store import JobEvent, Store

# Longest wait of one read for news.
BLOCK_MS = 500
COUNT = 1000
MAX_HELD_BYTES = 4 << 20

Position = tuple[int, int]


def position_of(event_id: str) -> Position:
    """`MILLISECONDS-NUMBER` as a comparable value."""
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number or 0)


class EventTail:
    """Take ``generation`` before ``since``, and wait for another one if there was nothing."""

    def __init__(
        self, store: Store, job: str, after: str, render: Callable[[JobEvent], bytes], stopping: asyncio.Event
    ) -> None:
        self._store = store
        self._job = job
        self._after = after
        self._render = render
        self._stopping = stopping
        self._news = asyncio.Event()
        self._held: deque[tuple[Position, str, bytes]] = deque()
        self._held_bytes = 0
        self._floor = position_of(after)
        """Everything behind this position and up to the newest is held."""
        self.generation = 0
        self.is_over = False
        """The job has ended: all its events were written before this was set."""
        self.failure: Exception | None = None
        self.num_readers = 0

    async def run(self) -> None:
        try:
            await self._begin()
            while self.num_readers and not self.is_over and not self._stopping.is_set():
                events = await self._store.events.read(self._job, self._after, count=COUNT, block_ms=BLOCK_MS)
                is_over = (await self._store.jobs.get(self._job)).status.is_terminal
                self._hold(events)
                if events or is_over:
                    self.is_over = is_over
                    self._wake()
        except Exception as error:  # its readers meet it
            self.failure = error
        finally:
            self._wake()

    async def _begin(self) -> None:
        """The first client may have named a position in the future; others wait for earlier events."""
        newest = await self._store.events.newest(self._job) or "0"
        if position_of(newest) < self._floor:
            self._after, self._floor = newest, position_of(newest)

    def since(self, after: str) -> tuple[bytes, str] | None:
        """The frames after a position, and the position behind them; None if the tail holds too little."""
        position = position_of(after)
        if position < self._floor:
            return None
        pieces: list[bytes] = []
        newest = after
        # From the end: readers that keep up want the last one or two events.
        for at, event_id, piece in reversed(self._held):
            if at <= position:
                break
            newest = event_id if not pieces else newest
            pieces.append(piece)
        return b"".join(reversed(pieces)), newest

    def _hold(self, events: list[JobEvent]) -> None:
        for event in events:
            if event.type == "gap":  # not the readers' gap: each has a position of its own
                self._held.clear()
                self._held_bytes, self._floor = 0, position_of(event.id)
                continue
            piece = self._render(event)
            self._held.append((position_of(event.id), event.id, piece))
            self._held_bytes += len(piece)
        while self._held_bytes > MAX_HELD_BYTES:
            self._floor, _, piece = self._held.popleft()
            self._held_bytes -= len(piece)
        if events:
            self._after = events[-1].id

    def _wake(self) -> None:
        self.generation += 1
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, generation: int, timeout_s: float) -> bool:
        """Wait for news since ``generation``; whether there may be some. Raises the tail's error."""
        if self.generation == generation:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
        if self.failure is not None:
            raise self.failure
        return self.generation != generation


class EventTails:
    """The tails of this process, one for each job with followers. They end when it is ``stopping``."""

    def __init__(self, store: Store, render: Callable[[JobEvent], bytes], stopping: asyncio.Event) -> None:
        self._store = store
        self._render = render
        self._stopping = stopping
        self._held: dict[str, tuple[EventTail, asyncio.Task[None]]] = {}

    @contextlib.contextmanager
    def of(self, job: str, after: str) -> Iterator[EventTail]:
        """The tail of a job; a new one begins at the position ``after``."""
        held = self._held.get(job)
        if held is None or held[1].done():
            tail = EventTail(self._store, job, after, self._render, self._stopping)
            tail.num_readers = 1
            self._held[job] = (tail, asyncio.create_task(tail.run(), name=f"tail of {job}"))
        else:
            tail = held[0]
            tail.num_readers += 1
        try:
            yield tail
        finally:
            tail.num_readers -= 1
            held = self._held.get(job)
            if not tail.num_readers and held is not None and held[0] is tail:
                del self._held[job]
                held[1].cancel()
