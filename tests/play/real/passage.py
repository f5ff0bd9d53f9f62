"""Between two processes: passes requests on, answers as they come, and lets somebody read along.

Rule: it changes nothing. A connection that breaks on one side is broken on the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np
from numpy.typing import NDArray
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

# Of one connection alone, or named anew by each side.
_OF_A_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"host", b"content-length"})

ReadAlong = Callable[[str, bytes, bytes], None]
"""Path, request and answer, whole."""


class Passage:
    """``target``: the address behind it, asked for each request."""

    def __init__(self, client: httpx.AsyncClient, target: Callable[[], str], read: ReadAlong | None = None) -> None:
        self._client, self._target, self._read = client, target, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        passing = asyncio.ensure_future(self._pass(scope, bytes(body), send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({passing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            passing.cancel()
            gone.cancel()
            await asyncio.gather(passing, gone, return_exceptions=True)

    async def _pass(self, scope: Scope, body: bytes, send: Send) -> None:
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        url = f"{self._target()}{scope['path']}{query}"
        headers = [(name, value) for name, value in scope["headers"] if name not in _OF_A_HOP]
        heard, has_begun = bytearray(), False
        try:
            async with self._client.stream(scope["method"], url, content=body, headers=headers) as answer:
                raw = [(name.lower(), value) for name, value in answer.headers.raw]
                kept = [(name, value) for name, value in raw if name not in _OF_A_HOP or name == b"content-length"]
                has_begun = True
                await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
                async for piece in answer.aiter_raw():
                    if self._read is not None:
                        heard += piece
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                if self._read is not None and answer.status_code == 200:
                    self._read(scope["path"], body, bytes(heard))
                await send({"type": "http.response.body", "body": b""})
        except httpx.TransportError as error:
            if has_begun:
                raise
            refused = PlainTextResponse(f"no answer from behind this: {error!r}", 503)
            await refused(scope, None, send)  # type: ignore[arg-type]


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Sample:
    """What the engine has answered to one request."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: Sequence[str]
    """Of each token: the label of the weights."""
    num_prompt: int = 0
    num_cached: int = 0
    """Tokens of the prompt whose keys and values the engine had."""
    seconds: float = 0.0
    """That the engine took, waits for other requests and for new weights included."""


@dataclass
class Samples:
    """All of them, by what they were sampled behind."""

    behind: dict[bytes, list[Sample]] = field(default_factory=dict)
    num: int = 0

    def read(self, path: str, asked: bytes, answered: bytes) -> None:
        if path != "/generate":
            return
        prompt, told = json.loads(asked)["input_ids"], json.loads(answered)
        if "output_ids" not in told or not told["output_ids"]:
            return
        meta = told["meta_info"]
        versions = [one["version"] for one in meta["weight_versions"] for _ in range(one["start"], one["end"])]
        ids = np.array(told["output_ids"], np.int32)
        logprobs = np.array([one[0] for one in meta["output_token_logprobs"]], np.float32)
        assert [one[1] for one in meta["output_token_logprobs"]] == told["output_ids"]
        cost = len(prompt), meta.get("cached_tokens", 0), meta.get("e2e_latency", 0.0)
        sample = Sample(ids, logprobs, versions, *cost)
        self.behind.setdefault(name_of(np.array(prompt, np.int32)), []).append(sample)
        self.num += 1


def name_of(ids: NDArray[np.int32]) -> bytes:
    return hashlib.sha1(ids.tobytes(), usedforsecurity=False).digest()
