"""The calls of one engine over HTTP, whatever its kind: keys, timeouts, refusals as our errors, ids checked both ways.

Rule: an answer other than a 2xx becomes one of our errors, and which one follows from its status alone, never from its
text. Paths and bodies belong to the kinds. Nothing here retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import httpx
import msgspec

from gspo_core.http_connection import HttpAnswer
from gspo_core.invariants import MAX_LOGPROB
from gspo_core.token_ids import TokenIds
from services.engines.keys import KeyPair, refusal
from services.engines.protocol import (
    EngineError,
    EngineKeyRefused,
    EngineProtocolError,
    EngineRejected,
    EngineUnavailable,
)
from services.engines.transport import EngineHttp, EngineTransport

CONNECT_TIMEOUT_S = 5.0
CONTROL_TIMEOUT_S = 30.0
CONTROL_TIMEOUT = httpx.Timeout(CONTROL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
# A request waits as long as its engine is paused, so a generate call has no deadline of its own.
GENERATE_TIMEOUT = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
# For the abort of a request that is no longer awaited.
ABORT_TIMEOUT_S = 2.0
# Refusals by a proxy in front of an engine, not about the request itself: timed out, too early, too many.
_NOT_NOW = frozenset({408, 425, 429})

Body: TypeAlias = Mapping[
    str, str | float | bool | msgspec.Raw | Sequence[str] | Sequence[Sequence[int]] | Mapping[str, float | str] | None
]


def open_http(*, max_connections: int = 512) -> httpx.AsyncClient:
    """A connection pool fit for engines: one connection per concurrent request, kept alive, no proxies.

    A request to an engine beyond its ``max_connections`` waits; leave room for control calls beside the generate calls.
    """
    return EngineHttp(EngineTransport(max_connections), GENERATE_TIMEOUT)


class HttpEngine:
    """One engine. Calls may overlap freely; the connection pool belongs to the caller."""

    def __init__(self, url: str, http: httpx.AsyncClient, keys: KeyPair | None = None) -> None:
        self.url = url.rstrip("/")
        scheme, colon, rest = self.url.partition("://")
        self._base = scheme.rpartition("+")[2] + colon + rest
        self._http = http
        self._keys = keys or KeyPair()

    async def until_lost(self) -> None:
        """Returns when the engine ends a connection on which nothing is asked, or when none can be made."""
        url = httpx.URL(self._base)
        is_tls = url.scheme == "https"
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    url.host, url.port or (443 if is_tls else 80), ssl=is_tls or None
                )
            try:
                await reader.read(1)
            finally:
                writer.close()

    async def abort(self, rid: str) -> None:
        raise NotImplementedError

    async def _abort_unawaited(self, rid: str) -> None:
        """The request may still be running there, but nothing awaits it now. (RuntimeError: the pool is closed.)"""
        with contextlib.suppress(EngineError, TimeoutError, RuntimeError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.abort(rid)

    def _checked_input(
        self, input_ids: Sequence[int], max_new_tokens: int, vocab_size: int | None = None
    ) -> msgspec.Raw:
        """The ids as JSON. Refuses ids that would crash a real engine."""
        if not input_ids:
            raise ValueError("a request needs at least one input id")
        ids = input_ids if isinstance(input_ids, TokenIds) else TokenIds(input_ids)
        if vocab_size is not None and ids.largest >= vocab_size:
            raise EngineRejected(f"{self.url}: not sent: input ids must be in [0, {vocab_size}), not {ids.largest}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        return msgspec.Raw(ids.to_json())

    async def _json(self, path: str) -> dict[str, Any]:
        response = await self._call("GET", path)
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"{self.url}{path}: {error}") from error

    async def _call(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        admin: bool = False,
        timeout: httpx.Timeout | None = None,
    ) -> HttpAnswer:
        """The answer if it is a 2xx; anything else becomes one of our errors."""
        answer = await self._send(method, path, body, admin=admin, timeout=timeout)
        if 200 <= answer.status_code < 300:
            return answer
        if answer.status_code == 401:
            raise EngineKeyRefused(refusal(self.url, control=admin))
        problem = f"{method} {self.url}{path}: {answer.status_code}: {_error_text(answer.content)}"
        is_busy = answer.status_code >= 500 or answer.status_code in _NOT_NOW
        raise EngineUnavailable(problem) if is_busy else EngineRejected(problem)

    async def _send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        admin: bool = False,
        timeout: httpx.Timeout | None = None,
        shows_key: bool = True,
    ) -> HttpAnswer:
        headers = {} if body is None else {"Content-Type": "application/json"}
        if shows_key and (key := self._keys.shown(for_control=admin)):
            headers["Authorization"] = f"Bearer {key}"
        content = b"" if body is None else msgspec.json.encode(body)
        given, url, http = timeout or CONTROL_TIMEOUT, self._base + path, self._http
        try:
            if isinstance(http, EngineHttp):
                return await http.ask(method, url, headers, content, given)
            response = await http.request(method, url, content=content, headers=headers, timeout=given)
            return HttpAnswer(response.status_code, response.content)
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{method} {url}: {type(error).__name__}: {error}") from error


def tokens_problem(
    output_ids: list[int], logprobs: list[float], max_new_tokens: int, vocab_size: int | None
) -> str | bool:
    """What is wrong with sampled tokens, whatever engine sampled them; False if nothing is."""
    return (
        (len(output_ids) > max_new_tokens and f"{len(output_ids)} tokens, {max_new_tokens} were requested")
        or (not all(-math.inf < logprob <= MAX_LOGPROB for logprob in logprobs) and "log-probs out of range")
        or (_has_foreign_ids(output_ids, vocab_size) and "ids outside the vocabulary")
    )


def _has_foreign_ids(output_ids: list[int], vocab_size: int | None) -> bool:
    return bool(output_ids) and not 0 <= min(output_ids) <= max(output_ids) < (vocab_size or math.inf)


def _error_text(content: bytes) -> str:
    """The message inside any of the shapes in which engines tell errors."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content[:500].decode("utf-8", "replace")
    if isinstance(body, dict):
        error = body.get("error", body)
        text = error.get("message", error) if isinstance(error, dict) else error
        return str(text)[:2000]
    return str(body)[:500]
