"""Answers that stay open: so many at once in this process, and so many of one caller.

Rule: one too many is refused before it begins, in the one shape of errors and with the time to come again; a seat is
free again however its stream ends. A stream ends with its caller's key, before the next piece of it. It does not know
what is streamed.
"""

from __future__ import annotations

import contextlib
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


async def _while_admitted(pieces: AsyncIterable[Piece], is_admitted: Callable[[], bool]) -> AsyncIterator[Piece]:
    async for piece in pieces:
        if not is_admitted():
            return
        yield piece


class BoundedStream(StreamingResponse):
    """A stream that takes one of its caller's seats while it lasts."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams: Streams = scope["app"].state.context.streams
        caller = scope["caller"]
        self.body_iterator = _while_admitted(self.body_iterator, scope["is_admitted"])
        with streams.seat(caller.name, is_alone=caller.is_keyless):
            await super().__call__(scope, receive, send)
