"""Serves an application over HTTP until the process is to end.

Rule: signals stay with ``services.process.lifecycle``, and connections are bounded by ``http_protocol``. It knows no
route.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.process.http_protocol import BoundedHttp
from services.process.settings import SettingsError
from services.process.telemetry import get_logger

# Longer than proxies and clients keep idle connections: a request on a connection that we are closing gets no answer.
KEEP_ALIVE_S = 75


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
