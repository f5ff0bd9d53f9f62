"""Serves an application over HTTP until the process is to end: uvicorn, with a bound on everything but bodies.

Rule: no client, authenticated or not, can make this process keep bytes, connections or time without bound. Bodies are
bounded where they are read; uvicorn and its parser bound neither the first line, nor headers, trailers or pipelined
requests, nor how long any of these may take, nor an answer that nobody reads; and a request may name no host, or two.
Signals stay with ``services.process.lifecycle``. It knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.process.http_connections import ConnectionPatience, Crowd, Part, allowed_connections, look_after
from services.process.lifecycle import tell_of_root
from services.process.listening import listen
from services.process.telemetry import get_logger

# Longer than proxies and clients keep idle connections: a request on a connection that we are closing gets no answer.
KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 64 * 1024
MAX_GATHERED_BYTES = 64 * 1024
"""An answer that has gathered more is sent on at once."""
MAX_WAITING = 100
"""Pipelined requests on one connection, behind the one in progress."""
MAX_UNWANTED_BYTES = 128 << 20
"""Bytes of a body that may follow its answer: many clients read a refusal only once they have sent everything."""
RETRY_AFTER_S = 5


class _Refused(Exception):
    """Why the connection is closed."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, code: str = "invalid_request"):
        super().__init__(message)
        self.answer = _refusal(status, code, message)


def _refusal(status: HTTPStatus, code: str, message: str) -> bytes:
    """An answer in the shape that all errors of ours have, and that clients of models read as well."""
    again = status is HTTPStatus.SERVICE_UNAVAILABLE
    error = {
        "type": "unavailable_error" if again else "invalid_request_error",
        "code": code,
        "message": message,
        "param": None,
        "request_id": None,
        "retry_after_s": float(RETRY_AFTER_S) if again else None,
    }
    body = json.dumps({"error": error}).encode()
    retry = f"retry-after: {RETRY_AFTER_S}\r\n" if again else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n{retry}"
        f"x-content-type-options: nosniff\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_TOO_LONG = _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", "The headers are too long.")
_TOO_LATE = _refusal(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "The request did not arrive in time.")


class Gathered(asyncio.Transport):
    """What is written within one turn of the event loop leaves as one: the head of an answer with its body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._num_passed_on = 0
        self._loop = asyncio.get_running_loop()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._pieces:
            self._loop.call_soon(self.flush)
        self._pieces.append(bytes(data))
        self._num_bytes += len(data)
        if self._num_bytes > MAX_GATHERED_BYTES:
            self.flush()

    def flush(self) -> None:
        pieces, self._pieces, self._num_bytes = self._pieces, [], 0
        if pieces and not self._transport.is_closing():
            data = b"".join(pieces)
            self._num_passed_on += len(data)
            self._transport.write(data)

    def sent_and_unsent(self) -> tuple[int, int]:
        """Bytes that the machine has taken so far, and those that wait for it to take them."""
        unsent = self._transport.get_write_buffer_size()
        return self._num_passed_on - unsent, unsent

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._pieces = []
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


class BoundedHttp(HttpToolsProtocol):
    _num_kept = 0
    """Bytes since the last end of headers, piece of a body or end of a request."""
    _num_unwanted = 0
    _refusal = b""

    def __init__(self, *given: Any, crowd: Crowd, **named: Any) -> None:
        super().__init__(*given, **named)
        self._crowd = crowd
        self._waiting = ConnectionPatience()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathered = Gathered(transport)
        super().connection_made(self._gathered)
        self._crowd.has_room(len(self.connections))
        self._crowd.head_begins(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leaves(self)
        super().connection_lost(exc)

    def look(self, seconds: float) -> None:
        is_stuck = self._waiting.is_stuck(seconds, *self._gathered.sent_and_unsent())
        # Behind a request that is not answered yet, a second one may take its time.
        is_ours = self.flow.read_paused or (self._waiting.part is Part.HEAD and self._is_owed)
        if is_stuck:
            self.transport.abort()
        elif not self.transport.is_closing() and self._waiting.is_late(seconds, is_reading=not is_ours):
            self.give_way()

    @property
    def _is_owed(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def give_way(self) -> None:
        """Close, with a word where a request was begun and nothing of an answer to it."""
        is_begun = self.scope is not None and self._waiting.part is not Part.NOTHING
        if is_begun and not self.pipeline and not (self._is_owed and self.cycle.response_started):
            self.transport.write(_TOO_LATE)
        self.transport.close()

    def on_response_complete(self) -> None:
        self._gathered.flush()  # before the application goes on: what it has sent is on its way
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._crowd.rests(self)

    def data_received(self, data: bytes) -> None:
        # In pieces, so that a body sent together with its head does not count as head.
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            piece = data[begin : begin + MAX_HEAD_BYTES]
            self._num_kept += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._num_kept > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LONG)
                self.transport.close()
                return

    def on_message_begin(self) -> None:
        self._waiting.expect(Part.HEAD)
        if not self._is_owed:
            self._crowd.head_begins(self)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_kept = 0
        self._waiting.expect(Part.BODY)
        self._crowd.head_is_there(self)
        try:
            self._admit()
        except _Refused as refused:
            # Raising stops the parser, and uvicorn then calls ``send_400_response``.
            self._refusal = refused.answer
            raise
        super().on_headers_complete()

    def _admit(self) -> None:
        if len(self.pipeline) >= MAX_WAITING:
            raise _Refused("Too many requests are waiting on this connection.")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise _Refused("A request must name exactly one host.")
        if not self._crowd.has_room(len(self.connections)):
            message = "Too many connections are open here; try again."
            raise _Refused(message, HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections")

    def send_400_response(self, msg: str) -> None:
        self.transport.write(self._refusal or _refusal(HTTPStatus.BAD_REQUEST, "invalid_request", msg))
        self.transport.close()

    def on_body(self, body: bytes) -> None:
        self._num_kept = 0
        self._waiting.came(len(body))
        if self.cycle.response_complete:
            self._num_unwanted += len(body)
            if self._num_unwanted > MAX_UNWANTED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_kept = self._num_unwanted = 0
        self._waiting.expect(Part.NOTHING)
        super().on_message_complete()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to services.process.lifecycle."""
        yield


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    grace_s: int,
    settings: str,
    lifespan: bool = True,
    fd: int | None = None,
) -> None:
    """Serve until ``stop`` is set, and let open requests end for ``grace_s``. ``settings`` names, for errors, those
    that gave the address.

    ``fd``: a socket of the parent that listens there already. It outlives this process, and so do connections that were
    not accepted yet.
    """
    crowd = Crowd(allowed_connections())
    config = uvicorn.Config(
        app,
        http=partial(BoundedHttp, crowd=crowd),  # type: ignore[arg-type]  # it is only called
        # No route uses it, and its handshake would bypass the bounds and the log of requests.
        ws="none",
        lifespan="on" if lifespan else "off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config)
    with listen(host, port, settings) if fd is None else socket.socket(fileno=fd) as listening:
        host, port = listening.getsockname()[:2]
        get_logger().info("listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
        tell_of_root()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listening]), name="serving")
            stopping = tasks.create_task(stop.wait(), name="stopping")
            looking = tasks.create_task(look_after(server.server_state.connections), name="looking")  # type: ignore[arg-type]
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                raise RuntimeError("the HTTP server stopped on its own; see its log")
            server.should_exit = True
            await serving
            looking.cancel()
