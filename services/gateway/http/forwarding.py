"""Passes a request on to the gateway that holds its episode, so that several stand behind one address.

Rule: a request goes to a gateway of this installation or nowhere: the address comes from the record that a gateway
keeps of itself in Redis, and is believed for a moment only, since episodes move; the key was signed here, and a request
that was passed on once is answered where it came to. That it was, a gateway says in a header that nobody else can
write: who could would take turns out of training, as not delivered. Its answer is handed back byte by byte, and the
gateway that gave it is told whether the client had all of it: a turn counts as delivered when the client has it, not
when a neighbour does, and a neighbour that says nothing has not delivered. An episode that was erased is held by none,
and that is said at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import httpx
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gspo_core.types import EpisodeKey
from services.episodes.keys import Keys
from services.gateway.dialects.dialect import fault_of
from services.gateway.dialects.turns import ERASED, OVER, Answer, PendingAnswer, Piece, Refusal, RefusalKind
from services.gateway.http.requests import KEY_HEADERS, dialect_of, key_of
from services.gateway.http.streams import fault_reply
from services.process.cancelling import cancel_all
from services.process.telemetry import get_logger
from services.state.client import Away
from services.state.fleet import Fleet
from services.state.queue import Bus

FORWARDED_BY = "x-gspo-forwarded-by"
TURN = "x-gspo-turn"
REWARD = "/v1/episode/reward"
RECEIPT = "/v1/episode/receipt"
CONNECT_S = 2.0
# An episode that nobody holds at the moment, or one that is gone, is looked for so long, and so often.
SEARCH_S, LOOK_S = 10.0, 0.25
# For one connection, not for the whole message.
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", TURN}
)
# What was found of an episode is believed so long, and kept of so many.
BELIEVED_S = 2.0
MAX_KNOWN = 4096
RECEIPT_PATIENCE_S = 30.0


class Elsewhere(Protocol):
    async def address_of(self, key: EpisodeKey) -> str:
        """Empty where no other gateway holds it. Raises ``Refusal`` where none ever will."""
        ...

    async def is_over(self, key: EpisodeKey) -> bool: ...

    def forget(self, key: EpisodeKey) -> None: ...


class Neighbours:
    """Which of several gateways holds an episode, and where it is reached. It does not judge whether a key is right."""

    def __init__(self, name: str, bus: Bus, fleet: Fleet, clock: Callable[[], float]) -> None:
        """``name``: of this gateway."""
        self._name = name
        self._bus = bus
        self._fleet = fleet
        self._clock = clock
        self._known: OrderedDict[EpisodeKey, tuple[float, str]] = OrderedDict()

    async def address_of(self, key: EpisodeKey) -> str:
        """The base URL of the other gateway that holds the episode; empty if none does. Raises ``Refusal``."""
        found_at, address = self._known.get(key, (0.0, ""))
        if not address or self._clock() - found_at > BELIEVED_S:
            address = await self._look(key)
            self._known[key] = self._clock(), address
            self._known.move_to_end(key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return address

    async def is_over(self, key: EpisodeKey) -> bool:
        """No gateway will ever hold it (again)."""
        return await self._bus.is_over(key)

    def forget(self, key: EpisodeKey) -> None:
        """It did not answer there."""
        self._known.pop(key, None)

    async def _look(self, key: EpisodeKey) -> str:
        holder = await self._bus.holder(key)
        if not holder and await self._bus.was_erased(key):
            raise Refusal(RefusalKind.ENDED, ERASED)
        if not holder or holder == self._name:
            return ""
        record = await self._fleet.worker(holder)
        return "" if record is None or record.kind != "gateway" else record.address


def between_gateways() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        # A turn takes as long as it takes; both gateways show signs of life, or the connection breaks.
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        trust_env=False,
    )


class ForwardingMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        name: str,
        keys: Keys,
        absent: Callable[[str], EpisodeKey | None],
        neighbours: Elsewhere,
        http: httpx.AsyncClient,
        leaving: asyncio.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``absent``: the episode of a right key that is not here, nor has ended here. ``leaving``: nobody waits here
        any more for an episode that nobody holds."""
        self._app = app
        self._name = name
        self._keys = keys
        self._absent = absent
        self._neighbours = neighbours
        self._clock = clock
        self._http = http
        self._leaving = leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = scope["type"] == "http" and scope["path"].startswith(("/v1/", "/v1beta/"))
        until = self._clock() + SEARCH_S
        if is_asked:
            scope = self._without_claims(scope)
        try:
            found = await self._elsewhere(scope, until) if is_asked else None
            while found is not None and not await self._is_passed_on(found, until, scope, receive, send):
                found = await self._elsewhere(scope, until)
        except Refusal as refusal:
            await _refuse(refusal, scope, receive, send)
            return
        if found is None:
            await self._app(scope, receive, send)

    def _without_claims(self, scope: Scope) -> Scope:
        """Without a header that says what is not so."""
        said = Headers(scope=scope).get(FORWARDED_BY)
        if said is None or self._keys.vouches(said):
            return scope
        return {**scope, "headers": [one for one in scope["headers"] if one[0] != FORWARDED_BY.encode()]}

    async def _is_passed_on(
        self, found: tuple[EpisodeKey, str], until: float, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """False: nobody is at that address, and the episode is worth another look. Raises ``Refusal``."""
        episode, address = found
        try:
            await _Passing(self._http, address, self._keys.vouch(self._name), scope, receive, send).run()
        except _NotReached as error:
            self._neighbours.forget(episode)
            get_logger().warning("a neighbour did not answer", address=address, error=str(error))
            if error.was_asked or self._clock() > until or self._leaving.is_set():
                text = "the gateway of this episode does not answer; ask again"
                raise Refusal(RefusalKind.AWAY, text) from error
            await self._pause()
            return False
        return True

    async def _elsewhere(self, scope: Scope, until: float) -> tuple[EpisodeKey, str] | None:
        """Raises ``Refusal`` where it is nowhere, and never will be."""
        headers = Headers(scope=scope)
        if FORWARDED_BY in headers:
            return None
        while (episode := self._sought(headers)) is not None:
            is_taken_anyway = scope["path"] == REWARD  # also for an episode that nobody holds
            with contextlib.suppress(Away):
                if address := await self._neighbours.address_of(episode):
                    return episode, address
                if not is_taken_anyway and await self._neighbours.is_over(episode):
                    raise Refusal(RefusalKind.ENDED, OVER)
            if self._clock() > until or is_taken_anyway or self._leaving.is_set():
                break
            await self._pause()
        return None

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._leaving.wait()

    def _sought(self, headers: Headers) -> EpisodeKey | None:
        try:
            return self._absent(key_of(headers))
        except Refusal:
            return None  # the route says so, in the words of its dialect


async def _refuse(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """In the dialect of the request."""
    await fault_reply(dialect_of(scope["path"], Headers(scope=scope)), fault_of(refusal), {})(scope, receive, send)


class _NotReached(Exception):
    """Nothing was answered yet."""

    def __init__(self, message: str, *, was_asked: bool) -> None:
        """``was_asked``: something of the request is on its way, and is here no more."""
        super().__init__(message)
        self.was_asked = was_asked


class _Passing:
    """One request."""

    def __init__(
        self, http: httpx.AsyncClient, address: str, vouched: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._http = http
        self._address = address
        self._scope = scope
        self._receive = receive
        self._send = send
        sent = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        self._headers = [(name, value) for name, value in sent if name not in _HOP_BY_HOP] + [(FORWARDED_BY, vouched)]
        self._has_begun = False
        """Something of its body was taken."""
        self._is_read = asyncio.Event()
        self._is_gone = False
        self._turn = ""

    async def run(self) -> None:
        """Raises ``_NotReached``; an answer that breaks off is broken off for the client too."""
        gone = asyncio.create_task(self._client_gone(), name="client gone")
        passing = asyncio.create_task(self._pass_on(), name="passing on")
        try:
            await asyncio.wait({gone, passing}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            await cancel_all([gone, passing])
            if self._turn:
                await self._tell(is_delivered=False)

    async def _pass_on(self) -> None:
        path, query = self._scope["raw_path"].decode("latin-1"), self._scope["query_string"].decode("latin-1")
        url = f"{self._address}{path.partition('?')[0]}" + (f"?{query}" if query else "")
        request = self._http.build_request(self._scope["method"], url, headers=self._headers, content=self._body())
        try:
            answer = await self._http.send(request, stream=True)
        except httpx.TransportError as error:
            raise _NotReached(f"{type(error).__name__}: {error}", was_asked=self._has_begun) from error
        try:
            self._turn = answer.headers.get(TURN, "")
            kept = [(name, value) for name, value in answer.headers.raw if name.decode().lower() not in _HOP_BY_HOP]
            await self._send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for piece in answer.aiter_raw():
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            await answer.aclose()
        if self._turn and not self._is_gone:
            await self._tell(is_delivered=True)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self) -> AsyncIterator[bytes]:
        self._has_begun = True
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_gone = True
                raise httpx.WriteError("the client is gone")
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                self._is_read.set()
                return

    async def _client_gone(self) -> None:
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True

    async def _tell(self, *, is_delivered: bool) -> None:
        """The gateway that gave the answer, whether the client has it."""
        turn, self._turn = self._turn, ""
        named = {"authorization", *KEY_HEADERS, FORWARDED_BY}
        headers = [(name, value) for name, value in self._headers if name in named]
        body = {"turn": turn, "delivered": is_delivered}
        try:
            await self._http.post(f"{self._address}{RECEIPT}", json=body, headers=headers, timeout=CONNECT_S)
        except httpx.TransportError as error:  # then it counts as one that the client does not have
            get_logger().warning("a neighbour was not told of a delivery", address=self._address, error=str(error))


class Receipts:
    """Answers that a neighbour hands to the client: open until it says whether the client has them."""

    def __init__(self, patience_s: float = RECEIPT_PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._open: dict[tuple[str, str], list[PendingAnswer]] = {}
        """By key and turn; a turn may be given to several clients at once."""

    def through_a_neighbour(self, key: str, pending: PendingAnswer) -> Forwarded:
        return Forwarded(self, key, pending)

    def hold(self, key: str, pending: PendingAnswer) -> None:
        self._open.setdefault((key, pending.id), []).append(pending)
        asyncio.get_running_loop().call_later(self._patience_s, self._give_up, key, pending)

    async def settle(self, key: str, turn: str, *, is_delivered: bool) -> None:
        """Harmless for a turn that is not open (any more)."""
        held = self._open.get((key, turn))
        if held:
            pending = held[0]
            self._remove(key, pending)
            if is_delivered:
                await pending.delivered()
            pending.dropped()

    def _give_up(self, key: str, pending: PendingAnswer) -> None:
        self._remove(key, pending)
        pending.dropped()  # which says nothing of one that was delivered

    def _remove(self, key: str, pending: PendingAnswer) -> None:
        held = self._open.get((key, pending.id), [])
        if pending in held:
            held.remove(pending)
        if not held:
            self._open.pop((key, pending.id), None)


class Forwarded:
    """A ``PendingAnswer`` whose client is behind a neighbour."""

    def __init__(self, receipts: Receipts, key: str, pending: PendingAnswer) -> None:
        self._receipts = receipts
        self._key = key
        self._pending = pending
        self._is_handed_on = False

    @property
    def id(self) -> str:
        return self._pending.id

    @property
    def created_at(self) -> int:
        return self._pending.created_at

    @property
    def num_prompt_tokens(self) -> int:
        return self._pending.num_prompt_tokens

    @property
    def trace(self) -> str:
        return self._pending.trace

    @property
    def left_out(self) -> Sequence[str]:
        return self._pending.left_out

    def __aiter__(self) -> AsyncIterator[Piece | Answer]:
        return aiter(self._pending)

    async def whole(self) -> Answer:
        return await self._pending.whole()

    async def delivered(self) -> None:
        self._is_handed_on = True
        self._receipts.hold(self._key, self._pending)

    def dropped(self) -> None:
        if not self._is_handed_on:
            self._pending.dropped()
