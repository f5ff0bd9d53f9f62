"""Scripted engines inside a test's own process: an httpx transport that finds them by the host name of a URL."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from tests.apparatus.scripted_engine.engine import Died, ScriptedEngine
from tests.apparatus.scripted_engine.protocol import answer


class ScriptedTransport(httpx.AsyncBaseTransport):
    """``http://NAME`` reaches the engine of that name; a dead or unknown one refuses connections."""

    def __init__(self, engines: Mapping[str, ScriptedEngine]) -> None:
        self.engines = dict(engines)
        self.paths: list[str] = []
        """Of all requests that reached an engine, in order."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        engine = self.engines.get(request.url.host)
        if engine is None or engine.dead.is_set():
            raise httpx.ConnectError("connection refused", request=request)
        content = await request.aread()
        self.paths.append(request.url.path)
        try:
            status, body = await answer(engine, request.method, request.url.path, dict(request.url.params), content)
        except Died as error:
            raise httpx.ReadError("connection lost", request=request) from error
        return httpx.Response(status, content=body)
