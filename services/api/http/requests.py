"""Common to every request: an id, a log line, and a body that is read with care.

One rule: no caller can make the service read without bound, or send a text that can be understood in two ways; a body
where none is taken, an unknown parameter and one that is given twice are refused, not ignored. Every failure of ours is
answered in the one shape and logged under the same id.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import islice
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, JsonValue
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gspo_core import strict_json
from gspo_core.problems import MAX_PROBLEMS, Problem
from services.api.http import listing
from services.api.http.audit import Audit
from services.api.http.errors import RequestRefused, error_response, invalid, translate
from services.api.http.traffic import Traffic
from services.process.telemetry import get_logger
from services.state.jobs import new_job_id

# A job specification is a page of text; this is a hundred of them.
MAX_BODY_BYTES = 1 << 20
# So much of a body is read where none is taken.
_SHORT = 64
_UNLESS_SAID = ((b"cache-control", b"private, no-cache"), (b"x-content-type-options", b"nosniff"))


class RequestMiddleware:
    """Names each request, logs it when it is over, and answers errors that nothing below handled."""

    def __init__(self, app: ASGIApp, traffic: Traffic, audit: Audit | None) -> None:
        self._app = app
        self._traffic = traffic
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["request_id"] = _new_request_id()
        started, status = time.monotonic(), 0
        if self._audit is not None:
            self._audit.begin()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*_guarded(message["headers"]), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientDisconnect:  # in the middle of its request: there is no client to answer
            return
        except Exception as error:
            answer = translate(error)
            if answer.status_code == 500:
                # As plain text: renderers that show local variables would show the headers, and keys with them.
                trace = "".join(traceback.format_exception(error))
                get_logger().error("request failed", request_id=request_id, path=scope["path"], trace=trace)
            if status:  # half an answer is out; only the end of the connection can tell
                raise
            await error_response(answer, request_id)(scope, receive, send_named)
        finally:
            seconds = time.monotonic() - started
            self._traffic.count(scope, status, seconds)
            if self._audit is not None:
                await self._audit.note(scope, request_id, status)
            _log(scope, request_id, status, seconds)


def _guarded(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An answer that says nothing else is for its caller alone, asked for anew each time, and what it says it is."""
    given = {name.lower() for name, _ in headers}
    return [*headers, *(one for one in _UNLESS_SAID if one[0] not in given)]


def _new_request_id() -> str:
    return "req_" + new_job_id(time.time()).removeprefix("job_")


def _log(scope: Scope, request_id: str, status: int, seconds: float) -> None:
    # Reading is the daily noise of pollers; what changes something, or fails, is kept.
    is_noise = scope["method"] in ("GET", "HEAD") and 0 < status < 500
    log = get_logger().debug if is_noise else get_logger().info
    log(
        "request",
        request_id=request_id,
        method=scope["method"],
        path=scope["path"],
        status=status,
        duration_ms=round(seconds * 1000, 1),
        credential=scope.get("credential"),
    )


class StrictRoute(APIRoute):
    """A route whose body is bounded, strict JSON, sent as such, and which refuses what it does not read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        names, takes_labels = _query_names(self.dependant)
        takes_body = self.body_field is not None or "requestBody" in (self.openapi_extra or {})

        async def handle_strictly(request: Request) -> Response:
            refused = list(islice(_query_problems(request.query_params, names, takes_labels), MAX_PROBLEMS))
            if refused:
                raise invalid(refused)
            if not takes_body:
                await _refuse_body(request, names)
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


def _query_problems(given: QueryParams, names: Sequence[str], takes_labels: bool) -> Iterator[Problem]:
    for name, times in Counter(name for name, _ in given.multi_items()).items():
        if name not in names and not (takes_labels and listing.is_label(name)):
            what = f"{name} is not a parameter of this route; {_known(names)}"
            yield Problem("unknown_parameter", (name,), what)
        elif times > 1:
            yield Problem("validation_failed", (name,), f"{name} is given {times} times; only one could be acted on")


def _query_names(dependant: Dependant) -> tuple[list[str], bool]:
    """The query parameters of a route, and whether it also selects by labels (`metadata[NAME]`)."""
    names: list[str] = []
    takes_labels = False
    for inner in dependant.dependencies:
        more, more_labels = _query_names(inner)
        names, takes_labels = names + more, takes_labels or more_labels
    for field in dependant.query_params:
        model = field.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            names += [one.alias or name for name, one in model.model_fields.items()]
            takes_labels = takes_labels or issubclass(model, listing.Labelled)
        else:
            names.append(field.alias)
    return names, takes_labels


async def _refuse_body(request: Request, names: Sequence[str]) -> None:
    """An empty object says as little as no body."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    size, start = 0, b""
    async for chunk in request.stream():
        size += len(chunk)
        start += chunk[: _SHORT - len(start)]
        if size > _SHORT:
            break
    if start.strip() not in (b"", b"{}") or size > _SHORT:
        what = f"this route takes no body and would ignore this one; {_known(names)}"
        raise RequestRefused(400, "unexpected_body", what)


def _known(names: Sequence[str]) -> str:
    return f"its query parameters are {', '.join(names)}" if names else "it has no parameters"


class _StrictRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_bounded"):
            self._bounded = await self._read()
        return self._bounded

    async def json(self) -> JsonValue:
        try:
            body = await self.body()
            parsed: JsonValue = strict_json.parse(body)
        except strict_json.TextRejected as error:
            where = f" (line {error.line}, column {error.column})" if error.line else ""
            raise RequestRefused(400, "invalid_json", f"the body is not JSON: {error}{where}") from None
        if strict_json.has_half_a_character(body, parsed):
            what = "the body holds half of a surrogate pair, which is no character"
            raise RequestRefused(400, "invalid_json", what)
        return parsed

    async def _read(self) -> bytes:
        data = await read_bounded(self, ("application/json",), MAX_BODY_BYTES)
        if not data:
            raise RequestRefused(400, "invalid_json", "the body is empty; send JSON")
        return data


async def read_bounded(request: Request, kinds: Sequence[str], most_bytes: int) -> bytes:
    """A body of one of the media types. Raises RequestRefused 413, 415."""
    # A page in a browser can send other types than ours to any address without asking.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() not in kinds:
        raise RequestRefused(415, "unsupported_media_type", f"send the body with Content-Type: {' or '.join(kinds)}")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most_bytes:
            raise RequestRefused(413, "body_too_large", f"a body may have at most {most_bytes} bytes here")
        chunks.append(chunk)
    return b"".join(chunks)
