"""A service that plays an agent, for tests: it answers as it was told to, and keeps what it heard."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Service:
    """Answers POST as it was told to, in turn; the last answer goes on."""

    answers: Sequence[tuple[int, bytes]]
    url: str = ""
    heard: list[tuple[str | None, dict[str, Any]]] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    connections: list[socket.socket] = field(default_factory=list)


@contextmanager
def serving(*answers: tuple[int, bytes], version: str = "HTTP/1.0") -> Iterator[Service]:
    """``version``: with HTTP/1.1 connections are kept."""
    service = Service(answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def setup(self) -> None:
            service.connections.append(self.request)
            super().setup()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = service.answers[min(len(service.heard), len(service.answers) - 1)]
            service.heard.append((self.headers["Idempotency-Key"], body))
            service.asked.set()
            if not status:  # as if it had died in the middle
                self.connection.close()
                self.close_connection = True
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None: ...

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (OSError, ValueError):
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_address[1]}/play?mode=train"
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
