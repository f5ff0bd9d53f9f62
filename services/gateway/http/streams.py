"""Sends one answer to a client, whole or as a stream, while the connection lasts.

Rule: a turn counts as delivered once the last byte of its answer was written to a connection that was open, and at
that moment: a client that has read it may ask again at once. Until anything is sent, an error has a status of its own.
What a turn waits for is not known here; a stream shows signs of life meanwhile, and a whole answer cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gspo_core.json_value import JSON
from services.gateway.dialects.dialect import STREAM_HEADERS, Dialect, Fault, Heading, ParsedRequest, fault_of
from services.gateway.dialects.turns import Answer, PendingAnswer, Piece, Refusal, RefusalKind
from services.process.cancelling import cancel_all

# So long an answer may begin with an error that clients act on by its status.
COMMIT_AFTER_S = 10.0
# Proxies cut connections that are silent for half a minute, and some clients do.
ALIVE_EVERY_S = 10.0
# Names the conversation of a talk key, by which the API shows it and a job is made of it.
TRACE = "x-gspo-trace"


@dataclass(frozen=True, slots=True)
class Pace:
    commit_after_s: float = COMMIT_AFTER_S
    alive_every_s: float = ALIVE_EVERY_S


class ClientGone(Exception):
    """The connection broke, so there is nobody to answer."""


class _RefusedInTime(Exception):
    """Nothing was sent yet, so that the refusal can have its own status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class TurnResponse:
    """A response that is one turn."""

    def __init__(
        self,
        dialect: Dialect,
        question: ParsedRequest,
        model: str,
        pending: PendingAnswer,
        headers: Mapping[str, str],
        leaving: asyncio.Task[bool],
        pace: Pace,
    ) -> None:
        """``leaving`` ends when this gateway leaves; it is all replies' together."""
        self._dialect = dialect
        self._question = question
        self._model = model
        self._pending = pending
        self._headers = headers
        self._told = {**headers, TRACE: pending.trace} if pending.trace else headers
        """With an answer; what was refused may be in no conversation."""
        self._leaving = leaving
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _Items(self._pending, receive, self._leaving) as items:
            try:
                if self._question.is_stream:
                    await self._stream(items, send)
                else:
                    await self._send_whole(items, send)
            except ClientGone:
                return
            except _RefusedInTime as refused:
                reply = fault_reply(self._dialect, fault_of(refused.refusal), self._headers)
                await reply(scope, receive, send)
            finally:
                self._pending.dropped()  # which says nothing of a turn that was delivered

    async def _send_whole(self, items: _Items, send: Send) -> None:
        answer = await items.take_whole()
        body = msgspec.json.encode(self._dialect.whole(self._question, self._model, answer))
        headers = {**self._told, "content-type": "application/json", "content-length": str(len(body))}
        await send(_start(200, headers))
        await self._send_last(body, items, send)

    async def _stream(self, items: _Items, send: Send) -> None:
        item = await items.take_first(self._pace.commit_after_s)
        pending = self._pending
        heading = Heading(pending.id, pending.created_at, self._model, pending.num_prompt_tokens)
        writer = self._dialect.writer(self._question, heading)
        await send(_start(200, {**self._told, **STREAM_HEADERS}))
        await send(_body(writer.begin()))
        while not isinstance(item, Answer):
            await send(_body(writer.piece(item) if item is not None else writer.alive()))
            try:
                item = await items.take(self._pace.alive_every_s)
            except Refusal as refusal:
                await send(_body(writer.fail(fault_of(refusal)), more=False))
                return
        await self._send_last(writer.end(item), items, send)

    async def _send_last(self, body: bytes, items: _Items, send: Send) -> None:
        await send(_body(body, more=False))
        if not items.is_client_gone:
            await self._pending.delivered()


def fault_reply(dialect: Dialect, fault: Fault, headers: Mapping[str, str]) -> Response:
    status, body = dialect.fault(fault)
    return json_reply(body, {**headers, **fault.headers}, status)


def json_reply(body: JSON, headers: Mapping[str, str], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


class _Items:
    """The items of an answer, as long as there is a client. The request's body must have been read."""

    def __init__(self, pending: PendingAnswer, receive: Receive, leaving: asyncio.Task[bool]) -> None:
        self._pending = pending
        self._items: AsyncIterator[Piece | Answer] | None = None
        self._next: asyncio.Task[Piece | Answer] | None = None
        self._gone = asyncio.create_task(_disconnected(receive), name="client gone")
        self._leaving = leaving

    async def __aenter__(self) -> _Items:
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_all([self._gone] if self._next is None else [self._gone, self._next])

    @property
    def is_client_gone(self) -> bool:
        return self._gone.done()

    async def take_whole(self) -> Answer:
        """Like ``take_first``, the last item alone."""
        self._next = asyncio.create_task(self._pending.whole(), name="answer")
        item = await self.take_first(None)
        assert isinstance(item, Answer)
        return item

    async def take_first(self, wait_s: float | None) -> Piece | Answer | None:
        """Like ``take``, while nothing was sent. Raises ``_RefusedInTime``, also where this gateway leaves: the client
        then asks another one."""
        try:
            return await self._take(wait_s, {self._leaving})
        except Refusal as refusal:
            raise _RefusedInTime(refusal) from None

    async def take(self, wait_s: float) -> Piece | Answer | None:
        """None after ``wait_s`` without an item. Raises ``Refusal`` and ``ClientGone``."""
        return await self._take(wait_s, set())

    async def _take(self, wait_s: float | None, more: set[asyncio.Task[Any]]) -> Piece | Answer | None:
        if self._next is None:
            self._items = self._items or aiter(self._pending)
            self._next = asyncio.create_task(_next(self._items), name="next item")
        await asyncio.wait({self._next, self._gone, *more}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if self._next.done():
            ready, self._next = self._next, None
            return ready.result()
        if self._gone.done():
            raise ClientGone
        if any(task.done() for task in more):
            raise Refusal(RefusalKind.AWAY, "this gateway is about to leave; ask again, and another one answers")
        return None


async def _next(items: AsyncIterator[Piece | Answer]) -> Piece | Answer:
    return await anext(items)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Mapping[str, str]) -> dict[str, object]:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def _body(body: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": more}
