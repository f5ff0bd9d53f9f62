"""Common to every request of an agent: its key, its line in the log, and an answer where something failed.

Rule: the key stands in a header, never in a path, and is never logged, nor is a path that is none of ours.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import traceback
from collections.abc import Collection, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.dialects.anthropic_messages import AnthropicMessages
from services.gateway.dialects.dialect import Dialect, Fault, fault_of, final
from services.gateway.dialects.gemini import PREFIX, Gemini, path_of
from services.gateway.dialects.openai_chat import OpenAIChat
from services.gateway.dialects.openai_responses import OpenAIResponses
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.gateway.http.bodies import BodyTooLarge, Seats
from services.gateway.http.streams import fault_reply
from services.process.telemetry import get_logger

# Keys of episodes begin with it, so that one is found beside a key of another service.
KEY_PREFIX = "ep_"
# Beside ``authorization``.
KEY_HEADERS = ("x-api-key", "x-goog-api-key")

_FOREIGN = "(none of ours)"
_WHY = "gspo.refused"
# Names of fields that may be told where others read; a client may call a field anything.
TELLABLE = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")
_LEAVING = Refusal(RefusalKind.AWAY, "this gateway is about to leave; ask again, and another one answers")


def key_of(headers: Mapping[str, str], prefix: str = KEY_PREFIX) -> str:
    """The key of the episode, where clients of any dialect put it; of several, one with the ``prefix``. Raises
    ``Refusal``."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = [bearer.strip()] if scheme.lower() == "bearer" else []
    if sent and sent[0].startswith(prefix):
        return sent[0]
    sent = [key for key in (*sent, *(headers.get(name, "").strip() for name in KEY_HEADERS)) if key]
    if not sent:
        message = "no key: send that of the episode as Authorization: Bearer KEY, as x-api-key or as x-goog-api-key"
        raise Refusal(RefusalKind.UNKNOWN_KEY, message)
    return next((key for begin in (prefix, KEY_PREFIX) for key in sent if key.startswith(begin)), sent[0])


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """The dialect of errors that are raised before one has read the request: that of the path, where it has one."""
    if is_gemini(path, headers):
        return Gemini()
    if path.startswith("/v1/responses"):
        return OpenAIResponses()
    is_anthropic = path.startswith("/v1/messages") or (
        "anthropic-version" in headers and not path.startswith("/v1/chat/")
    )
    return AnthropicMessages() if is_anthropic else OpenAIChat()


def is_gemini(path: str, headers: Mapping[str, str]) -> bool:
    """Whose models are listed where OpenAI's are, to clients that send their key as Google's do."""
    is_shared = path == "/v1/models" or path.startswith("/v1/models/")
    is_own = path == PREFIX or path.startswith("/v1beta/") or path_of(path) is not None
    return is_own or (is_shared and "x-goog-api-key" in headers)


def refuse_key_in_url(path: str, headers: Mapping[str, str], query: Mapping[str, str]) -> None:
    """Google's API takes it there too. Raises ``Refusal``."""
    if "key" in query and is_gemini(path, headers):
        message = "a key must not stand in the URL, which proxies write down: send it in the header x-goog-api-key"
        raise Refusal(RefusalKind.UNKNOWN_KEY, message)


async def refused(request: Request, error: Exception) -> Response:
    """The answer to a request that ended with ``error``."""
    request.scope[_WHY] = fault = _fault(request, error)
    return fault_reply(dialect_of(request.url.path, request.headers), fault, {})


def _fault(request: Request, error: Exception) -> Fault:
    if isinstance(error, Refusal):
        return fault_of(error)
    if isinstance(error, BodyTooLarge):
        return final(413, "body_too_large", str(error))
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return final(404, "not_found", f"this gateway has no route {request.method} {request.url.path}")
    return final(error.status_code, "method_not_allowed", f"{request.url.path} does not take {request.method}")


def _why(scope: Scope) -> dict[str, str]:
    """What was wrong with a request that was refused, without a word of what it says."""
    fault: Fault | None = scope.get(_WHY)
    if fault is None:
        return {}
    field = {"field": fault.param if TELLABLE.fullmatch(fault.param) else "unknown"} if fault.param else {}
    return {"refused": fault.code, **field}


class GatewayMiddleware:
    """Names each request and logs it when it is over. Turns an error that nothing below handled into a 500."""

    def __init__(self, app: ASGIApp, paths: Collection[str], seats: Seats) -> None:
        self._app = app
        self._paths = paths
        self._seats = seats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        started, status = time.monotonic(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # The one is read by clients of OpenAI, the other by those of Anthropic.
                names = (b"x-request-id", b"request-id")
                message["headers"] = [*message["headers"], *((name, request_id.encode()) for name in names)]
            await send(message)

        try:
            await self._answer(scope, receive, send_named)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            # The process leaves, and nobody waits longer for what this request waits for.
            if status:
                raise
            await self._fail(scope, fault_of(_LEAVING), receive, send_named)
        except Exception as error:
            # As plain text: renderers that show local variables would show headers, and keys with them.
            trace = "".join(traceback.format_exception(error))
            get_logger().error("request failed", request_id=request_id, path=self._path(scope), trace=trace)
            if status:  # half an answer is out; only the end of the connection can tell
                raise
            fault = Fault(500, "internal", f"the gateway failed; its log says why, under {request_id}")
            await self._fail(scope, fault, receive, send_named)
        finally:
            log = get_logger().info if status >= 400 else get_logger().debug
            duration_ms = round((time.monotonic() - started) * 1000, 1)
            told = {"method": scope["method"], "path": self._path(scope), "status": status, **_why(scope)}
            log("request", request_id=request_id, **told, duration_ms=duration_ms)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            refuse_key_in_url(scope["path"], request.headers, request.query_params)
            if scope["method"] != "POST" or self._path(scope) == _FOREIGN:
                await self._app(scope, receive, send)
                return
            with self._seats.taken(key_of(request.headers)):
                await self._app(scope, receive, send)
        except Refusal as refusal:
            await (await refused(request, refusal))(scope, receive, send)

    async def _fail(self, scope: Scope, fault: Fault, receive: Receive, send: Send) -> None:
        dialect = dialect_of(scope["path"], {name.decode("latin-1"): "" for name, _ in scope["headers"]})
        await fault_reply(dialect, fault, {})(scope, receive, send)

    def _path(self, scope: Scope) -> str:
        path = path_of(scope["path"])
        return scope["path"] if scope["path"] in self._paths else _FOREIGN if path is None else path.known
