"""An agent behind a URL: it is sent the task, a base URL and a key, and has played the episode when it answers.

Rule: a start is one start, however often it is sent: each repetition carries the same ``Idempotency-Key``. It is
repeated only where that can help, for a while; redirects are not followed. Which addresses may be connected to is
judged by the process that this runs in (``gspo_core.outbound``). It needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from gspo_core.env.agent_runs import AgentFailed, Llm
from gspo_core.json_value import JSON
from gspo_core.outbound import AddressRefused

CONNECT_TIMEOUT_S = 10.0
PAUSE_S = (0.2, 5.0)
MAX_ANSWER_BYTES = 1 << 20
# What an overloaded service, or a proxy before one that restarts, answers.
_AGAIN = frozenset({408, 425, 429, 502, 503, 504})
_ACCEPTED = 202


class UrlRun:
    """``run`` returns the answer's JSON. An agent that answers 202 plays on and says itself when it has finished."""

    def __init__(
        self,
        url: str,
        task: Mapping[str, JSON],
        llm: Llm,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``patience_s``: for how long a service may be away."""
        self._url, self._task, self._llm = urlsplit(url), task, llm
        self._patience_s, self._clock = patience_s, clock
        self._is_cancelled = threading.Event()
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> JSON:
        body = self._body()
        away_since: float | None = None
        pause_s = PAUSE_S[0]
        while not self._is_cancelled.is_set():
            began = self._clock()
            try:
                status, answer = self._post(body)
            except AddressRefused:
                raise
            except (OSError, http.client.HTTPException) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if status == _ACCEPTED:
                    self._is_cancelled.wait()
                    return None
                if 200 <= status < 300:
                    return _read(answer)
                problem = f"it answered {status}: {answer[:500].decode('utf-8', 'replace')}"
                if status not in _AGAIN:
                    raise AgentFailed(f"{self._url.hostname}: {problem}")
            if away_since is None or self._clock() - began > self._patience_s:  # it had been there meanwhile
                away_since, pause_s = self._clock(), PAUSE_S[0]
            if self._clock() - away_since >= self._patience_s:
                raise AgentFailed(f"{self._url.hostname} could not be reached for {self._patience_s:g}s: {problem}")
            self._is_cancelled.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])
        return None

    def cancel(self) -> None:
        self._is_cancelled.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with contextlib.suppress(OSError):  # it was closed already
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _body(self) -> bytes:
        llm = self._llm
        order = {"task": self._task, "base_url": llm.base_url, "api_key": llm.api_key, "episode": llm.episode}
        try:
            more = {"model": llm.model} | ({"reward_key": llm.reward_key} if llm.reward_key else {})
            return json.dumps(order | more, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise AgentFailed(f"the task is not JSON: {error}") from None

    def _post(self, body: bytes) -> tuple[int, bytes]:
        url = self._url
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = self._connection = kind(url.hostname or "", url.port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            if self._is_cancelled.is_set():
                raise ConnectionAbortedError("cancelled")
            # An episode may take hours; a peer that is gone is noticed by the kernel.
            connection.sock.settimeout(None)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            headers = {"Content-Type": "application/json", "Idempotency-Key": self._llm.episode}
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(MAX_ANSWER_BYTES + 1)
        finally:
            connection.close()


def _read(answer: bytes) -> JSON:
    """Nothing, or JSON. Raises ``AgentFailed``."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise AgentFailed(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    try:
        found: JSON = json.loads(answer) if answer.strip() else None
    except ValueError as error:
        raise AgentFailed(f"its answer is not JSON: {error}") from None
    return found
