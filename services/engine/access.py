"""Lets in only those who show the engine's key, as the server that defines the protocol does.

Rule: with a key, everything but the probes of health asks for it; with a key apart for control, the calls that change
weights or what runs ask for that one alone. Keys are compared in constant time, and are in no answer and no log.
"""

from __future__ import annotations

import hmac

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.engines.keys import KeyPair

_OPEN = frozenset({"/health", "/health_generate", "/ready"})


class EngineAccess:
    """Middleware. ``control`` are the paths of control calls."""

    def __init__(self, app: ASGIApp, keys: KeyPair, control: frozenset[str]) -> None:
        self._app = app
        self._keys = keys
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(scope):
            refused = JSONResponse({"error": "Unauthorized"}, 401)
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in _OPEN or (key := self._keys.shown(for_control=path in self._control)) is None:
            return True
        shown = Request(scope).headers.get("authorization", "")
        return hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), f"Bearer {key}".encode())
