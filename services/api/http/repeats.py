"""`Idempotency-Key`: a POST that is sent again under the same key is answered again, not executed again.

Rule: of all requests of one caller under one key, one is executed; the others wait for its answer and get the same one.
The key is taken before the work begins and the answer is kept before it is sent, so any answer may be lost. Refusals
are not kept: they changed nothing, and the same request may be right in a minute. An answer that must not be stored (a
key's secret) is remembered by this process alone.

Submitting a job has a stronger way of its own: its key is written down with the job (`JobTable.create`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.http.access import Caller
from services.api.http.errors import FINAL, RequestRefused
from services.api.http.requests import MAX_BODY_BYTES
from services.process.cancelling import cancel_all
from services.state.client import Away
from services.state.kept_replies import LEASE_S, Begun, KeptReplies

HEADER = "Idempotency-Key"
KEY = re.compile(r"[\x21-\x7e]{1,255}")
# These routes store the key with the thing that they create.
OWN_WAY = frozenset({"/v1/jobs", "/v1/fine_tuning/jobs", "/v1/jobs/{id}/episodes:lease"})
_OWN_WAY = re.compile("|".join(re.sub(r"{\w+}", "[^/]+", path) for path in OWN_WAY))
UPLOADS = "/v1/environments/uploads"
WAIT_S, LOOK_S = 30.0, 0.05
MAX_REPLY_BYTES = 256 * 1024
MAX_SECRETS = 1000


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def is_secret(self) -> bool:
        return any(name == b"cache-control" and b"no-store" in value for name, value in self.headers)

    def pack(self) -> bytes:
        """An answer as it is kept; of a secret one, only that it was given."""
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers]
        body = None if self.is_secret else self.body.decode("utf-8")
        return json.dumps([self.status, headers, body]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> KeptAnswer | None:
        """None: it was a secret."""
        status, headers, body = json.loads(data)
        if body is None:
            return None
        pairs = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers)
        return cls(status, pairs, body.encode())

    async def send(self, send: Send, *, is_repeated: bool = False) -> None:
        further = [(b"idempotent-replayed", b"true")] if is_repeated else []
        start = {"type": "http.response.start", "status": self.status, "headers": [*self.headers, *further]}
        await send(start)
        await send({"type": "http.response.body", "body": self.body})


class RepeatMiddleware:
    """Below access, which names the caller; above the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._secrets: OrderedDict[str, KeptAnswer] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or "caller" not in scope:
            await self._app(scope, receive, send)
            return
        key = Headers(scope=scope).get(HEADER)
        if key is None or _OWN_WAY.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        if not KEY.fullmatch(key):
            message = f"{HEADER} must have 1 to 255 visible characters"
            raise RequestRefused(422, "validation_failed", message, param=HEADER)
        body, again, is_whole = await _read(scope, receive)
        if not is_whole:  # too long: the route refuses it
            await self._app(scope, again, send)
            return
        await self._once(_name(scope, key), _digest(scope, body), scope, again, send)

    async def _once(self, name: str, request: str, scope: Scope, receive: Receive, send: Send) -> None:
        replies: KeptReplies = scope["app"].state.context.replies
        owner = uuid4().hex
        begun = await _begin(replies, name, request, owner)
        if begun is not None:
            await self._answer_again(name, begun, send)
            return
        try:
            async with _renewed(replies, name, owner):
                answer = await _whole_answer(self._app, scope, receive)
        except Exception:
            with contextlib.suppress(Away):
                await replies.drop(name, owner)
            raise
        if answer.status < 300 and len(answer.body) <= MAX_REPLY_BYTES:
            self._remember(name, answer)
            await replies.keep(name, request, owner, answer.pack())
        else:
            await replies.drop(name, owner)
        await answer.send(send)

    def _remember(self, name: str, answer: KeptAnswer) -> None:
        if answer.is_secret:
            self._secrets[name] = answer
            while len(self._secrets) > MAX_SECRETS:
                self._secrets.popitem(last=False)

    async def _answer_again(self, name: str, begun: Begun, send: Send) -> None:
        answer = KeptAnswer.unpack(begun.reply or b"") or self._secrets.get(name)
        if answer is None:
            message = "this was done, and its answer is a secret that is not kept; undo it and retry with a new key"
            raise RequestRefused(409, "answer_not_kept", message, param=HEADER, headers=FINAL)
        await answer.send(send, is_repeated=True)


async def _begin(replies: KeptReplies, name: str, request: str, owner: str) -> Begun | None:
    """The earlier answer, or None if the request is ours to execute. Raises RequestRefused 409."""
    loop = asyncio.get_running_loop()
    until = loop.time() + WAIT_S
    while True:
        begun = await replies.begin(name, request, owner)
        if begun is not None and begun.request != request:
            message = f"this {HEADER} was already used for a different request; use a new key"
            raise RequestRefused(409, "idempotency_conflict", message, param=HEADER, headers=FINAL)
        if begun is None or begun.reply is not None:
            return begun
        if loop.time() > until:
            message = "the same request is still in progress; try again"
            raise RequestRefused(409, "in_progress", message, param=HEADER, headers={"Retry-After": "1"})
        await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def _renewed(replies: KeptReplies, name: str, owner: str) -> AsyncIterator[None]:
    async def renew() -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            with contextlib.suppress(Away):
                await replies.renew(name, owner)

    renewing = asyncio.create_task(renew(), name="renewing a request")
    try:
        yield
    finally:
        await cancel_all([renewing], again_after_s=0.1)


async def _whole_answer(app: ASGIApp, scope: Scope, receive: Receive) -> KeptAnswer:
    status, pieces = 0, list[bytes]()
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def collect(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], tuple((bytes(n), bytes(v)) for n, v in message["headers"])
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, collect)
    return KeptAnswer(status, headers, b"".join(pieces))


async def _read(scope: Scope, receive: Receive) -> tuple[bytes, Receive, bool]:
    """The body, a way to read it again, and whether it is complete. Raises ClientDisconnect."""
    most = MAX_BODY_BYTES
    if scope["path"] == UPLOADS:
        from services.files.environments.archives import MAX_PACKED_BYTES  # most installations take no uploads

        most = MAX_PACKED_BYTES
    messages: list[Message] = []
    size, more = 0, True
    while more and size <= most:
        message = await receive()
        if message["type"] == "http.disconnect":  # before it was begun: a repetition finds nothing done
            raise ClientDisconnect
        messages.append(message)
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body, left = b"".join(one.get("body", b"") for one in messages), iter(messages)

    async def again() -> Message:
        kept = next(left, None)
        return await receive() if kept is None else kept

    return body, again, not more


def _name(scope: Scope, key: str) -> str:
    """Keys of different callers never meet."""
    caller: Caller = scope["caller"]
    return hashlib.sha256(json.dumps([caller.name, key]).encode()).hexdigest()


def _digest(scope: Scope, body: bytes) -> str:
    kind = Headers(scope=scope).get("content-type", "")
    parts = (scope["path"].encode("utf-8", "surrogatepass"), scope["query_string"], kind.encode(), body)
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
