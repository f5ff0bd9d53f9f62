"""Answers that stay open: so many at once in this process, and so many of one caller.

Rule: one too many is refused before it begins, in the one shape of errors and with the time to come again; a seat is
free again however its stream ends. A stream ends within a second of its caller's key, before the next piece of it: one
that clients open again ends as if it were over, and a download breaks off, so that it is not taken for whole.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from typing import TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.api.http.errors import RequestRefused

# An open page of the viewer holds one or two.
MAX_STREAMS = 1024
MAX_STREAMS_OF_ONE = 256
RETRY_AFTER_S = 10
EVENTS = "text/event-stream"
# Keys lie in files, and a download has many pieces.
LOOK_S = 1.0


class KeyEnded(Exception):
    """The caller of a download may have no more of it."""


class Streams:
    def __init__(self, most: int = MAX_STREAMS, most_of_one: int = MAX_STREAMS_OF_ONE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def seat(self, caller: str, *, is_alone: bool = False) -> Iterator[None]:
        """``is_alone``: this machine has no other caller to leave room for. Raises RequestRefused 429 and 503."""
        again = {"Retry-After": str(RETRY_AFTER_S)}
        if not is_alone and self._open[caller] >= self._most_of_one:
            message = f"this key has {self._most_of_one} streams open here, and may not have more; close some"
            raise RequestRefused(429, "too_many_streams", message, headers=again)
        if self._open.total() >= self._most:
            message = f"{self._most} streams are open here, as many as may be; try again, or ask for pages of events"
            raise RequestRefused(503, "too_many_streams", message, headers=again)
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]


Piece = TypeVar("Piece")


async def _while_admitted(
    pieces: AsyncIterable[Piece], is_admitted: Callable[[], bool], *, breaks_off: bool
) -> AsyncIterator[Piece]:
    looked = -math.inf
    async for piece in pieces:
        now = time.monotonic()
        if now - looked >= LOOK_S:
            looked = now
            if not is_admitted():
                if breaks_off:
                    raise KeyEnded("the key of this download has ended")
                return
        yield piece


@contextlib.contextmanager
def seated(scope: Scope) -> Iterator[None]:
    """A seat of the caller of this request. Raises RequestRefused 429 and 503."""
    streams: Streams = scope["app"].state.context.streams
    caller = scope["caller"]
    with streams.seat(caller.name, is_alone=caller.is_keyless):
        yield


class BoundedStream(StreamingResponse):
    """A stream that takes one of its caller's seats while it lasts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with seated(scope):
            await self.send_seated(scope, receive, send)

    async def send_seated(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Where its caller has a seat."""
        breaks_off = self.media_type != EVENTS
        self.body_iterator = _while_admitted(self.body_iterator, scope["is_admitted"], breaks_off=breaks_off)
        await super().__call__(scope, receive, send)
