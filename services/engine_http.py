"""A transport for httpx that holds many plain HTTP/1.1 connections to few engines.

Why: httpx's own pool looks through all its connections at every request and every answer. At 128 concurrent requests
that cost 6 ms of CPU time each, on the core that the trainer needs; this one costs a tenth.
Rule: one request at a time on a connection, and a connection whose exchange did not end cleanly is closed, never used
again. No redirects, proxies, cookies, streaming bodies or HTTP/2: engines are neighbours. Errors are httpx's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

_Origin = tuple[str, str, int]
_MAX_HEAD_BYTES = 2**16


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def is_usable(self) -> bool:
        return not (self.writer.is_closing() or self.reader.at_eof())


class EngineTransport(httpx.AsyncBaseTransport):
    """Opens a connection whenever none is idle; at most ``max_connections`` requests are on their way at a time."""

    def __init__(self, max_connections: int) -> None:
        self._slots = asyncio.Semaphore(max_connections)
        self._idle: defaultdict[_Origin, list[_Connection]] = defaultdict(list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async with self._slots:
            return await self._exchange(request)

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        timeouts = request.extensions.get("timeout", {})
        content = await request.aread()
        url = request.url
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        connection = await self._connect(origin, timeouts.get("connect"))
        try:
            async with asyncio.timeout(timeouts.get("read")):
                connection.writer.write(_head(request, len(content)) + content)
                await connection.writer.drain()
                response, keep = await _read_response(connection.reader, request.method)
        except TimeoutError as error:
            connection.writer.transport.abort()
            raise httpx.ReadTimeout("no complete answer in time", request=request) from error
        except (OSError, EOFError) as error:
            connection.writer.transport.abort()
            raise httpx.ReadError(f"connection lost: {error}", request=request) from error
        except (ValueError, LookupError, asyncio.LimitOverrunError) as error:
            connection.writer.transport.abort()
            raise httpx.RemoteProtocolError(f"not an HTTP/1.1 answer: {error}", request=request) from error
        except asyncio.CancelledError:
            connection.writer.transport.abort()
            raise
        if keep:
            self._idle[origin].append(connection)
        else:
            connection.writer.close()
        return response

    async def aclose(self) -> None:
        connections = [connection for idle in self._idle.values() for connection in idle]
        self._idle.clear()
        for connection in connections:
            connection.writer.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                await connection.writer.wait_closed()

    async def _connect(self, origin: _Origin, timeout_s: float | None) -> _Connection:
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
            connection.writer.close()
        scheme, host, port = origin
        try:
            async with asyncio.timeout(timeout_s):
                return _Connection(
                    *await asyncio.open_connection(host, port, ssl=scheme == "https" or None, limit=_MAX_HEAD_BYTES)
                )
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection to {host}:{port} in time") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error


class EngineHttp(httpx.AsyncClient):
    """A client without what ``send`` does beside sending: half of the CPU time of a request."""

    def __init__(self, transport: EngineTransport, timeout: httpx.Timeout) -> None:
        super().__init__(transport=transport, timeout=timeout, trust_env=False)
        self._engines = transport

    async def send(self, request: httpx.Request, **_options: Any) -> httpx.Response:
        if self.is_closed:
            raise RuntimeError("the client was closed")
        response = await self._engines.handle_async_request(request)
        response.request = request
        return response


def _head(request: httpx.Request, content_length: int) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines += [b"%s: %s" % header for header in request.headers.raw if header[0].lower() != b"content-length"]
    lines.append(b"Content-Length: %d" % content_length)
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _read_response(reader: asyncio.StreamReader, method: str) -> tuple[httpx.Response, bool]:
    """The answer, and whether the connection can be used again."""
    status_line, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    version, status, *_ = status_line.split(b" ", 2)
    if version != b"HTTP/1.1":
        raise ValueError(f"{version!r}")
    headers = []
    for line in lines:
        name, _, value = line.partition(b":")
        headers.append((name.lower(), value.strip()))
    fields = dict(headers)
    keep = fields.get(b"connection", b"").lower() != b"close"
    if method == "HEAD" or status in (b"204", b"304"):
        content = b""
    elif fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        content = b"".join([chunk async for chunk in _chunks(reader)])
        headers = [header for header in headers if header[0] != b"transfer-encoding"]
    elif b"content-length" in fields:
        content = await reader.readexactly(int(fields[b"content-length"]))
    else:
        content, keep = await reader.read(), False
    return httpx.Response(int(status), headers=headers, content=content), keep


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
