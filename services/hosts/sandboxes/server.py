"""The contract of sandboxes over HTTP (docs/sandboxes.md), for any kind of them: one thread for each connection.

Rule: nothing is read from a client without the key. Bodies are bounded, and so is the time for one. Answers are what
the sandbox said, or a reason; never a traceback.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from environments.sandbox.contract import Command, SandboxFailed
from services.hosts.sandboxes.table import NoSandbox, Table, TableFull

MAX_BODY_BYTES = 64 << 20
MAX_TIMEOUT_S = 24 * 3600.0
MAX_OUTPUT_BYTES = 8 << 20
# Between two requests of a connection, and between two pieces of one.
IDLE_S = 120.0
SWEEP_S = 1.0
_PATH = re.compile(r"/v1/sandboxes(?:/([0-9a-f]{32})(?:/(exec|files|snapshot|restore|renew))?)?")


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Contract(BaseHTTPRequestHandler):
    """``serving`` and ``serve_one`` make subclasses with a table."""

    table: Table
    key_sha256: str | None
    """None: the connection alone gives access."""
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    server_version, sys_version = "gspo-sandboxes", ""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the names that the standard library looks for

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def _serve(self) -> None:
        try:
            self._require_key()
            status, body = self._answered()
        except _Refused as refused:
            self.close_connection = True  # its body was perhaps not read
            status, body = refused.status, _reason(str(refused))
        except NoSandbox:
            status, body = HTTPStatus.NOT_FOUND, _reason("there is no such sandbox")
        except TableFull:
            status, body = HTTPStatus.TOO_MANY_REQUESTS, _reason("there is no room for another sandbox")
        except SandboxFailed as failed:
            status, body = HTTPStatus.BAD_GATEWAY, _reason(str(failed))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            self.close_connection = True
            status, body = HTTPStatus.UNPROCESSABLE_ENTITY, _reason(f"{type(error).__name__}: {error}"[:400])
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _require_key(self) -> None:
        if self.key_sha256 is None:
            return
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        digest = hashlib.sha256(shown.encode("utf-8", "surrogateescape")).hexdigest()
        if not hmac.compare_digest(digest, self.key_sha256):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "a wrong key")

    def _answered(self) -> tuple[HTTPStatus, bytes]:
        parts = urlsplit(self.path)
        found = _PATH.fullmatch(parts.path)
        if found is None:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is no such route")
        number, what = found[1], found[2]
        asked = {name: values for name, values in parse_qs(parts.query).items()}
        route = self._ROUTES.get((self.command, what if number else "create"))
        if route is None:
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "this cannot be done with it")
        return route(self, number or "", asked, self._body())

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") or not 0 <= length <= MAX_BODY_BYTES:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has a length of at most {MAX_BODY_BYTES}")
        body = self.rfile.read(length)
        if len(body) < length:
            raise _Refused(HTTPStatus.BAD_REQUEST, "the body ended early")
        return body

    # routes

    def _create(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        given = json.loads(body)
        made, root = self.table.create(_operation(given), str(given.get("base", "")))
        answer = {"id": made, "root": root, "lease_s": self.table.lease_s}
        return HTTPStatus.CREATED, json.dumps(answer).encode()

    def _exec(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        given = json.loads(body)
        operation = _operation(given)
        command = Command(**given["command"])
        if not 0 < command.timeout_s <= MAX_TIMEOUT_S or not 0 < command.most_bytes <= MAX_OUTPUT_BYTES:
            raise ValueError("timeout_s or most_bytes is out of its bounds")
        ended = self.table.once(number, operation, lambda sandbox: sandbox.run(command))
        return HTTPStatus.OK, json.dumps(asdict(ended)).encode()

    def _put(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        with self.table.using(number) as sandbox:
            sandbox.put(body, asked.get("instead_of", []))
        return HTTPStatus.NO_CONTENT, b""

    def _get(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        with self.table.using(number) as sandbox:
            found = sandbox.get(asked["path"][0], min(MAX_BODY_BYTES, int(asked["most_bytes"][0])))
        return _or_nothing(found)

    def _snapshot(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        given = json.loads(body)
        with self.table.using(number) as sandbox:
            found = sandbox.snapshot([str(one) for one in given["folders"]], int(given["most_bytes"]))
        return _or_nothing(found)

    def _restore(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        self.table.once(number, asked["operation"][0], lambda sandbox: sandbox.restore(body))
        return HTTPStatus.NO_CONTENT, b""

    def _renew(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        self.table.renew(number)
        return HTTPStatus.NO_CONTENT, b""

    def _delete(self, number: str, asked: Mapping[str, list[str]], body: bytes) -> tuple[HTTPStatus, bytes]:
        self.table.delete(number)
        return HTTPStatus.NO_CONTENT, b""

    _Route = Callable[[Any, str, Mapping[str, list[str]], bytes], tuple[HTTPStatus, bytes]]
    _ROUTES: Mapping[tuple[str, str | None], _Route] = {
        ("POST", "create"): _create,
        ("POST", "exec"): _exec,
        ("PUT", "files"): _put,
        ("GET", "files"): _get,
        ("POST", "snapshot"): _snapshot,
        ("POST", "restore"): _restore,
        ("POST", "renew"): _renew,
        ("DELETE", None): _delete,
    }


class SandboxServer(ThreadingHTTPServer):
    """For other machines."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], table: Table, key_sha256: str) -> None:
        super().__init__(address, _handler(table, key_sha256))
        self._table = table
        self._stopped = threading.Event()
        self._sweeping = threading.Thread(target=self._sweep, daemon=True)
        self._sweeping.start()

    def handle_error(self, request: object, client_address: object) -> None:
        return  # the client is gone

    def server_close(self) -> None:
        self._stopped.set()
        self._sweeping.join()
        self._table.close()
        super().server_close()

    def _sweep(self) -> None:
        while not self._stopped.wait(SWEEP_S):
            self._table.sweep()


def serve_one(connection: socket.socket, table: Table) -> None:
    """Serves until the connection ends, and then closes its sandboxes. It asks for no key."""
    try:
        handler = type("OneConnection", (_handler(table, None),), {"timeout": None})
        handler(connection, "", None)
    except OSError:
        return
    finally:
        connection.close()
        table.close()


def _handler(table: Table, key_sha256: str | None) -> type[Contract]:
    return type("Handler", (Contract,), {"table": table, "key_sha256": key_sha256})


def _operation(given: Mapping[str, object]) -> str:
    found = given["operation"]
    if not isinstance(found, str) or not 16 <= len(found) <= 64:
        raise ValueError("operation is a text of 16 to 64 characters")
    return found


def _reason(text: str) -> bytes:
    return json.dumps({"reason": text}).encode()


def _or_nothing(found: bytes | None) -> tuple[HTTPStatus, bytes]:
    return (HTTPStatus.NO_CONTENT, b"") if found is None else (HTTPStatus.OK, found)
