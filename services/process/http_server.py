"""Serves an application over HTTP until the process is to end: uvicorn, with a bound on everything but bodies.

Rule: no client, authenticated or not, can make this process keep bytes without bound. Bodies are bounded where they
are read; the parser itself bounds neither the first line, nor headers, trailers or pipelined requests, and it accepts a
request that names no host, or two. Signals stay with ``services.process.lifecycle``. It knows no route.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.process.settings import SettingsError
from services.process.telemetry import get_logger

# Longer than proxies and clients keep idle connections: a request on a connection that we are closing gets no answer.
KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 64 * 1024
MAX_WAITING = 100
"""Pipelined requests on one connection, behind the one in progress."""
_REASON = b"The headers are too long."
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_REASON), _REASON)
)


class _Refused(Exception):
    """Why the connection is closed."""


class BoundedHttp(HttpToolsProtocol):
    _num_kept = 0
    """Bytes since the last end of headers, piece of a body or end of a request."""
    _refusal = ""

    def data_received(self, data: bytes) -> None:
        # In pieces, so that a body sent together with its head does not count as head.
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            piece = data[begin : begin + MAX_HEAD_BYTES]
            self._num_kept += len(piece)
            super().data_received(piece)
            if self.transport.is_closing():
                return
            if self._num_kept > MAX_HEAD_BYTES:
                self.transport.write(_REFUSAL)
                self.transport.close()
                return

    def on_headers_complete(self) -> None:
        self._num_kept = 0
        try:
            self._admit()
        except _Refused as refused:
            # Raising stops the parser, and uvicorn then calls ``send_400_response``.
            self._refusal = str(refused)
            raise
        super().on_headers_complete()

    def _admit(self) -> None:
        if len(self.pipeline) >= MAX_WAITING:
            raise _Refused("Too many requests are waiting on this connection.")
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise _Refused("A request must name exactly one host.")

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._refusal or msg)

    def on_body(self, body: bytes) -> None:
        self._num_kept = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_kept = 0
        super().on_message_complete()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to services.process.lifecycle."""
        yield


async def serve_http(
    app: ASGIApp, host: str, port: int, stop: asyncio.Event, *, grace_s: int, settings: str, lifespan: bool = True
) -> None:
    """Serve until ``stop`` is set, and let open requests end for ``grace_s``. ``settings`` names, for errors, those
    that gave the address."""
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
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
    with _listen(host, port, settings) as listening:
        host, port = listening.getsockname()[:2]
        get_logger().info("listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listening]), name="serving")
            stopping = tasks.create_task(stop.wait(), name="stopping")
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                raise RuntimeError("the HTTP server stopped on its own; see its log")
            server.should_exit = True


def _listen(host: str, port: int, settings: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), port), family=family, backlog=512)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsError(f"cannot listen on {host}:{port} ({settings}): {reason}") from None
    # Connections inherit it; asyncio does not set it for them, since this socket has no protocol number. Without it the
    # body of an answer waits for the acknowledgement of its head: 40 ms on a kept-alive connection.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
