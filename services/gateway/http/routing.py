"""Leads a request to what answers it, by its exact path and method, or by what a path begins with.

Rule: another spelling of a path is no route: a redirected request loses its body in some clients. A request that is
refused is answered in the shape of its dialect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.dialects.turns import Refusal
from services.gateway.http.bodies import BodyTooLarge
from services.gateway.http.requests import refused

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]


class Routing:
    def __init__(
        self,
        posts: Mapping[str, Endpoint],
        gets: Mapping[str, Endpoint],
        posts_below: Mapping[str, Endpoint],
        gets_below: Mapping[str, Endpoint],
    ) -> None:
        """``..._below``: all paths that begin so; their endpoints know which of these there are."""
        self._by_method = {"POST": posts, "GET": gets, "HEAD": gets}
        self._below = {"POST": posts_below, "GET": gets_below, "HEAD": gets_below}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        answer: ASGIApp
        try:
            answer = await self._endpoint(scope["method"], scope["path"])(request)
        except (HTTPException, Refusal, BodyTooLarge) as error:
            answer = await refused(request, error)
        await answer(scope, receive, send)

    def _endpoint(self, method: str, path: str) -> Endpoint:
        """Raises ``HTTPException``."""
        endpoint = self._by_method.get(method, {}).get(path)
        if endpoint is None:
            below = self._below.get(method, {})
            endpoint = next((one for begin, one in below.items() if path.startswith(begin)), None)
        if endpoint is None:
            is_known = any(path in endpoints for endpoints in self._by_method.values())
            raise HTTPException(405 if is_known else 404)
        return endpoint
