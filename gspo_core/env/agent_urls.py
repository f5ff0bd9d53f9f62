"""An agent behind a URL: it is sent the task, a base URL and a key, and has played the episode when it answers.

Rule: a start is one start, however often it is sent: each repetition carries the same ``Idempotency-Key``. It is
repeated only where that can help, for a while; redirects are not followed. Which addresses may be connected to is
judged by the process that this runs in (``gspo_core.outbound``). It needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

from gspo_core.env.agent_runs import AgentFailed
from gspo_core.environment_contract import Llm
from gspo_core.http_connection import OLD_VERSION, VERSION, HttpAnswer, HttpConnection, NotHttp
from gspo_core.json_value import JSON
from gspo_core.outbound import AddressRefused

CONNECT_TIMEOUT_S = 10.0
PAUSE_S = (0.2, 5.0)
MAX_ANSWER_BYTES = 1 << 20
# What an overloaded service, or a proxy before one that restarts, answers.
_AGAIN = frozenset({408, 425, 429, 502, 503, 504})
_ACCEPTED = 202
# Small services are often written with what speaks the old version.
_connection = partial(HttpConnection, versions=(VERSION, OLD_VERSION))


class AgentService:
    """Where the agent is, with the connections that it keeps. They belong to one event loop."""

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._tls: ssl.SSLContext | None = None
        self._idle: list[HttpConnection] = []

    @property
    def host(self) -> str:
        return self._url.hostname or ""

    async def post(self, body: bytes, idempotency_key: str) -> HttpAnswer:
        """Raises ``OSError`` and ``NotHttp``."""
        url = self._url
        lines = [
            f"POST {url.path or '/'}{f'?{url.query}' if url.query else ''} HTTP/1.1".encode("ascii"),
            b"Host: " + url.netloc.encode("idna"),
            b"Content-Type: application/json",
            f"Idempotency-Key: {idempotency_key}".encode("ascii"),
            b"Content-Length: %d" % len(body),
        ]
        request = b"\r\n".join([*lines, b"", body])
        while self._idle:
            if (line := self._idle.pop()).is_usable:
                with contextlib.suppress(OSError):  # it was closed in this moment, which says nothing of a new one
                    return await self._exchange(line, request)
        return await self._exchange(await self._connect(), request)

    def close(self) -> None:
        """Ends the connections that nothing is asked on. A process that ends need not do so."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, line: HttpConnection, request: bytes) -> HttpAnswer:
        # An episode may take hours; a peer that is gone is noticed by the kernel.
        answer = await line.exchange(request, most_bytes=MAX_ANSWER_BYTES + 1)
        if line.is_usable:
            self._idle.append(line)
        return answer

    async def _connect(self) -> HttpConnection:
        loop, is_tls = asyncio.get_running_loop(), self._url.scheme == "https"
        port, error = self._url.port or (443 if is_tls else 80), OSError("it has no address")
        if is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        name = self.host if is_tls else None
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            for *_, address in await loop.getaddrinfo(self.host, port, type=socket.SOCK_STREAM):
                made = loop.create_connection(_connection, str(address[0]), port, ssl=self._tls, server_hostname=name)
                try:
                    transport, line = await made
                except OSError as failed:
                    error = failed
                else:
                    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    return line
        raise error


class UrlRun:
    """``run`` returns the answer's JSON, and waits on the event loop: all code here is ours. An agent that answers 202
    plays on and says itself when it has finished."""

    def __init__(
        self,
        service: AgentService,
        task: Mapping[str, JSON],
        llm: Llm,
        *,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``patience_s``: for how long a service may be away."""
        self._service, self._task, self._llm = service, task, llm
        self._patience_s, self._clock = patience_s, clock
        self._is_cancelled = False
        self._running: asyncio.Task[JSON] | None = None

    async def run(self) -> JSON:
        self._running = asyncio.current_task()
        try:
            return None if self._is_cancelled else await self._play()
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            return None

    def cancel(self) -> None:
        """``run`` returns soon, with nothing."""
        self._is_cancelled = True
        if self._running is not None:
            self._running.cancel()

    async def _play(self) -> JSON:
        body, name = self._body(), self._service.host
        away_since: float | None = None
        pause_s = PAUSE_S[0]
        while True:
            began = self._clock()
            try:
                answer = await self._service.post(body, self._llm.episode)
            except AddressRefused:
                raise
            except (OSError, NotHttp) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == _ACCEPTED:
                    await asyncio.Event().wait()  # until it is cancelled
                if 200 <= answer.status_code < 300:
                    return _read(answer.content)
                problem = f"it answered {answer.status_code}: {answer.content[:500].decode('utf-8', 'replace')}"
                if answer.status_code not in _AGAIN:
                    raise AgentFailed(f"{name}: {problem}")
            if away_since is None or self._clock() - began > self._patience_s:  # it had been there meanwhile
                away_since, pause_s = self._clock(), PAUSE_S[0]
            if self._clock() - away_since >= self._patience_s:
                raise AgentFailed(f"{name} could not be reached for {self._patience_s:g}s: {problem}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def _body(self) -> bytes:
        llm = self._llm
        order = {"task": self._task, "base_url": llm.base_url, "api_key": llm.api_key, "episode": llm.episode}
        try:
            more = {"model": llm.model} | ({"reward_key": llm.reward_key} if llm.reward_key else {})
            return json.dumps(order | more, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise AgentFailed(f"the task is not JSON: {error}") from None


def _read(answer: bytes) -> JSON:
    """Nothing, or JSON. Raises ``AgentFailed``."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise AgentFailed(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    try:
        found: JSON = json.loads(answer) if answer.strip() else None
    except ValueError as error:
        raise AgentFailed(f"its answer is not JSON: {error}") from None
    return found
