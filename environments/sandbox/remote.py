"""Sandboxes behind the HTTP contract (docs/sandboxes.md): on another machine, or at the end of a host's ``door``.

Rule: whatever is sent again is done once: what is created or run carries an operation, all else may be done twice.
A connection that fails, 429, 502 of a proxy and 503 are tried again; what a server refuses is not. Leases are renewed
while a sandbox is open. It needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from http import HTTPStatus
from urllib.parse import quote, urlencode, urlsplit

from environments.sandbox.contract import Command, Ended, Sandbox, SandboxFailed
from gspo_core.outbound import AddressRefused, Network, check_url, is_allowed

# For a call that runs no command; a command adds its own time.
CALL_S = 60.0
CONNECT_S = 10.0
NUM_TRIES = 5
RETRY_S = 0.2
MOST_BYTES = 64 << 20
_AGAIN = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})

Connect = Callable[[float], AbstractContextManager[http.client.HTTPConnection]]
"""A connection for one request, which waits so long for its answer."""


class RemoteSandboxes:
    """At one server. ``over_url`` makes one."""

    def __init__(self, connect: Connect, prefix: str = "", key: str = "", num_tries: int = NUM_TRIES) -> None:
        self._connect = connect
        self._num_tries = num_tries
        self._prefix = prefix
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._leases = _Leases()

    def refusal(self) -> str | None:
        """Deletes a sandbox that never existed, which the server answers only to the right key."""
        try:
            self.ask("DELETE", f"/v1/sandboxes/{'0' * 32}", num_tries=1)
        except SandboxFailed as failed:
            return str(failed)
        return None

    def create(self, base: str = "") -> Sandbox:
        asked = {"operation": uuid.uuid4().hex, "base": base}
        made = _object(self.ask("POST", "/v1/sandboxes", _json(asked)))
        number, root, lease_s = made.get("id"), made.get("root"), made.get("lease_s")
        if not isinstance(number, str) or not isinstance(root, str) or not isinstance(lease_s, int | float | None):
            raise SandboxFailed("the server of sandboxes did not say which it made")
        sandbox = RemoteSandbox(self, number, root)
        if lease_s is not None:
            self._leases.keep(sandbox, lease_s)
        return sandbox

    def forget(self, sandbox: RemoteSandbox) -> None:
        self._leases.leave(sandbox)

    def ask(
        self, method: str, path: str, body: bytes = b"", *, within_s: float = CALL_S, num_tries: int | None = None
    ) -> bytes | None:
        """None where there is no content. Raises ``SandboxFailed``."""
        reason = ""
        for number in range(num_tries or self._num_tries):
            if number:
                time.sleep(RETRY_S * 2**number * random.uniform(0.5, 1.0))
            try:
                status, answer = self._ask_once(method, path, body, within_s)
            except AddressRefused as refused:
                raise SandboxFailed(f"the server of sandboxes: {refused}") from None
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if status in (HTTPStatus.OK, HTTPStatus.CREATED):
                return answer
            if status == HTTPStatus.NO_CONTENT:
                return None
            reason = _reason(status, answer)
            if status not in _AGAIN:
                break
        raise SandboxFailed(f"the server of sandboxes: {reason}"[:400])

    def _ask_once(self, method: str, path: str, body: bytes, within_s: float) -> tuple[int, bytes]:
        with self._connect(within_s) as connection:
            connection.request(method, self._prefix + path, body, self._headers)
            answer = connection.getresponse()
            data = answer.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise http.client.HTTPException("the answer is too long")
            if answer.length:  # asked for so much at most, the library takes a shorter answer for a whole one
                raise http.client.IncompleteRead(data, answer.length)
            return answer.status, data


class RemoteSandbox:
    def __init__(self, server: RemoteSandboxes, number: str, root: str) -> None:
        self._server = server
        self._path = f"/v1/sandboxes/{quote(number, safe='')}"
        self.root = root

    def run(self, command: Command) -> Ended:
        asked = {"operation": uuid.uuid4().hex, "command": asdict(command)}
        answer = self._server.ask("POST", f"{self._path}/exec", _json(asked), within_s=command.timeout_s + CALL_S)
        try:
            return Ended(**_object(answer))  # type: ignore[arg-type]
        except TypeError:
            raise SandboxFailed("the server of sandboxes did not say how the command ended") from None

    def put(self, archive: bytes, instead_of: Sequence[str] = ()) -> None:
        query = urlencode([("instead_of", path) for path in instead_of])
        self._server.ask("PUT", f"{self._path}/files?{query}", archive)

    def get(self, path: str, most_bytes: int) -> bytes | None:
        query = urlencode({"path": path, "most_bytes": most_bytes})
        return self._server.ask("GET", f"{self._path}/files?{query}")

    def snapshot(self, folders: Sequence[str], most_bytes: int) -> bytes | None:
        return self._server.ask(
            "POST", f"{self._path}/snapshot", _json({"folders": list(folders), "most_bytes": most_bytes})
        )

    def restore(self, state: bytes) -> None:
        self._server.ask("POST", f"{self._path}/restore?operation={uuid.uuid4().hex}", state)

    def renew(self) -> None:
        self._server.ask("POST", f"{self._path}/renew", num_tries=1)

    def close(self) -> None:
        self._server.forget(self)
        self._server.ask("DELETE", self._path)


class _Leases:
    """Renews those of open sandboxes, in one thread that ends with the last of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[RemoteSandbox, float] = {}
        self._thread: threading.Thread | None = None

    def keep(self, sandbox: RemoteSandbox, lease_s: float) -> None:
        with self._changed:
            self._open[sandbox] = lease_s
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
                self._thread.start()

    def leave(self, sandbox: RemoteSandbox) -> None:
        with self._changed:
            self._open.pop(sandbox, None)
            self._changed.notify()

    def _renew(self) -> None:
        due: dict[RemoteSandbox, float] = {}
        while True:
            with self._changed:
                if not self._open:
                    self._thread = None
                    return
                now = time.monotonic()
                due = {one: due.get(one, now + lease_s / 3) for one, lease_s in self._open.items()}
                if (wait_s := min(due.values()) - now) > 0:
                    self._changed.wait(wait_s)
                    continue
                over = [one for one, at in due.items() if at <= now]
            for one in over:
                due.pop(one)
                with contextlib.suppress(SandboxFailed):  # the next call on it says why
                    one.renew()


def over_url(url: str, key: str, networks: Sequence[Network]) -> RemoteSandboxes:
    """Raises ``AddressRefused``. Each connection is to an address that was judged, whatever a resolver says later."""
    check_url(url, networks)
    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"

    def connect(within_s: float) -> AbstractContextManager[http.client.HTTPConnection]:
        made: http.client.HTTPConnection
        if tls:
            made = http.client.HTTPSConnection(host, parts.port, timeout=within_s, context=ssl.create_default_context())
        else:
            made = http.client.HTTPConnection(host, parts.port, timeout=within_s)
        made._create_connection = lambda address, timeout, *_: _judged(address, within_s, networks)  # type: ignore[attr-defined]
        return contextlib.closing(made)

    return RemoteSandboxes(connect, parts.path.rstrip("/"), key)


def _judged(address: tuple[str, int], within_s: float, networks: Sequence[Network]) -> socket.socket:
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for one in found:
        if not is_allowed(str(one[4][0]), networks):
            raise AddressRefused(f"{address[0]} resolves to an address that is not allowed")
    connection = socket.create_connection((str(found[0][4][0]), address[1]), CONNECT_S)
    connection.settimeout(within_s)
    return connection


def _json(value: Mapping[str, object]) -> bytes:
    return json.dumps(value).encode()


def _object(answer: bytes | None) -> dict[str, object]:
    try:
        found = json.loads(answer or b"")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise SandboxFailed("the server of sandboxes answered with something else than it should")
    return found


def _reason(status: int, answer: bytes) -> str:
    """What a server of ours says of it; of others the status alone."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        return f"status {status}: {json.loads(answer).get('reason', '')}"
    return f"status {status}"
