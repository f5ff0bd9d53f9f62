"""Many plain HTTP/1.1 connections to few engines: under httpx, or past it at a lower cost.

Why: httpx's own pool scans all its connections at every request and every answer. At 128 concurrent requests that cost
6 ms of CPU time each, on the core that the trainer needs. Most of the rest is the objects that httpx builds around a
request and its answer, so callers with thousands of requests use ``EngineHttp.ask``.
Rule: a connection whose exchange did not end cleanly is never used again. No redirects, proxies, cookies, streaming
bodies or HTTP/2: engines are neighbours. Errors are httpx's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httpx

from gspo_core.http_connection import HttpAnswer, HttpConnection, NotHttp

_Origin = tuple[str, str, int]
# A server that failed at a request may end the connection right after its answer, without a word about it there.
_FAILED = 500


class EngineTransport(httpx.AsyncBaseTransport):
    """Opens a connection whenever none is idle; at most ``max_connections`` requests are in flight to one engine.

    The bound is per engine: one that never answers must not hold up requests to others.
    """

    def __init__(self, max_connections: int) -> None:
        self._slots: defaultdict[_Origin, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(max_connections))
        self._idle: defaultdict[_Origin, list[HttpConnection]] = defaultdict(list)
        self._is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        headers = [b"%s: %s" % header for header in request.headers.raw if header[0].lower() != b"content-length"]
        head = _head(request.method, request.url.raw_path, headers, len(content))
        timeout = httpx.Timeout(**request.extensions.get("timeout", {"timeout": None}))
        has_content = request.method != "HEAD"
        answer = await self.exchange(_origin(request.url), head + content, timeout, has_content=has_content)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    async def exchange(
        self, origin: _Origin, request: bytes, timeout: httpx.Timeout, *, has_content: bool = True
    ) -> HttpAnswer:
        """Raises what httpx raises."""
        async with self._slots[origin]:
            line = await self._connect(origin, timeout.connect)
            try:
                async with _at_most(timeout.read):
                    answer = await line.exchange(request, has_content=has_content)
            except TimeoutError as error:
                raise httpx.ReadTimeout("no complete answer in time") from error
            except OSError as error:
                raise httpx.ReadError(f"connection lost: {error}") from error
            except NotHttp as error:
                raise httpx.RemoteProtocolError(f"not an HTTP/1.1 answer: {error}") from error
            if answer.status_code >= _FAILED or self._is_closed:
                line.close()
            elif line.is_usable:
                self._idle[origin].append(line)
            return answer

    async def aclose(self) -> None:
        self._is_closed = True  # what is in flight ends, and its connection is closed then
        lines = [line for idle in self._idle.values() for line in idle]
        self._idle.clear()
        for line in lines:
            line.close()
        await asyncio.sleep(0)  # sockets are closed by the loop, soon

    async def _connect(self, origin: _Origin, timeout_s: float | None) -> HttpConnection:
        idle = self._idle[origin]
        while idle:
            line = idle.pop()
            if line.is_usable:
                return line
        scheme, host, port = origin
        try:
            async with _at_most(timeout_s):
                loop = asyncio.get_running_loop()
                _, line = await loop.create_connection(HttpConnection, host, port, ssl=scheme == "https" or None)
                return line
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} in time") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error


class EngineHttp(httpx.AsyncClient):
    """A client whose ``send`` only sends: httpx's own spends half of the CPU time of a request on other things."""

    def __init__(self, transport: EngineTransport, timeout: httpx.Timeout) -> None:
        super().__init__(transport=transport, timeout=timeout, trust_env=False)
        self._engines = transport

    async def send(self, request: httpx.Request, **_options: Any) -> httpx.Response:
        self._check_open()
        response = await self._engines.handle_async_request(request)
        response.request = request
        return response

    async def ask(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes, timeout: httpx.Timeout
    ) -> HttpAnswer:
        """One exchange without httpx's objects. Raises what httpx raises."""
        self._check_open()
        origin, host, target = _parsed(url)
        lines = [host, *(f"{name}: {value}".encode("ascii") for name, value in headers.items())]
        return await self._engines.exchange(origin, _head(method, target, lines, len(content)) + content, timeout)

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the client was closed")


def _at_most(timeout_s: float | None) -> contextlib.AbstractAsyncContextManager[asyncio.Timeout | None]:
    return contextlib.nullcontext() if timeout_s is None else asyncio.timeout(timeout_s)


def _origin(url: httpx.URL) -> _Origin:
    return url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80)


@functools.lru_cache(maxsize=1024)
def _parsed(url: str) -> tuple[_Origin, bytes, bytes]:
    """Its origin, the header that names the host, and the request target."""
    parsed = httpx.URL(url)
    return _origin(parsed), b"Host: " + parsed.netloc, parsed.raw_path


def _head(method: str, target: bytes, headers: list[bytes], content_length: int) -> bytes:
    request_line = b"%s %s HTTP/1.1" % (method.encode("ascii"), target)
    return b"\r\n".join([request_line, *headers, b"Content-Length: %d\r\n\r\n" % content_length])
