"""Every error in one shape, whether a route, the framework or the store found it.

One rule: an error has a `code` for programs, a `message` for people and, where one is to blame, a `param`. It reveals
no internals (traces, keys, addresses). It chooses no status for a route.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gspo_core.problems import MAX_PROBLEMS, Problem, problems_of, spell
from gspo_core.spec import JobSpec
from services.api.http.unavailable import unavailable
from services.api.views.history import EpisodeForgotten, EpisodeNotKept, GroupNotKept
from services.files.batch_log import DamagedBatchLog
from services.files.environments.registry import EnvironmentNotFound
from services.state.keys import InvalidJobId
from services.state.store import IllegalTransition, InvalidCursor, JobConflict, JobInUse, JobNotFound

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    412: "conflict_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "unavailable_error",
}
# Some clients retry conflicts by themselves; this tells them that repeating the request changes nothing.
FINAL = {"x-should-retry": "false"}
RETRY_AFTER_S = 1


class RequestRefused(HTTPException):
    """An answer that is an error; raised anywhere below a route."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        errors: Sequence[Problem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.param = param
        self.errors = tuple(errors)


class ErrorBody(BaseModel):
    """What is wrong."""

    type: str
    code: str
    message: str
    param: str | None
    request_id: str | None
    retry_after_s: float | None


class ErrorAnswer(BaseModel):
    """The body of every answer with a status of 400 and above."""

    error: ErrorBody


def error_response(error: RequestRefused, request_id: str | None) -> Response:
    headers = dict(error.headers or {})
    retry_after = headers.get("Retry-After")
    body: dict[str, str | float | list[dict[str, str | None]] | None] = {
        "type": TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error"),
        "code": error.code,
        "message": error.detail,
        "param": error.param,
        "request_id": request_id,
        "retry_after_s": float(retry_after) if retry_after else None,
    }
    if len(error.errors) > 1:
        body["errors"] = [{"code": one.code, "message": one.message, "param": one.key or None} for one in error.errors]
    # A request may contain lone surrogates; they must not break the answer that complains about them.
    content = json.dumps({"error": body}).encode()
    return Response(content, error.status_code, headers, "application/json")


def documented(*statuses: int) -> dict[int | str, dict[str, type[BaseModel]]]:
    """These statuses of a route, for its OpenAPI entry."""
    return {status: {"model": ErrorAnswer} for status in statuses}


def invalid(found: Sequence[Problem]) -> RequestRefused:
    """422 for values that fail validation."""
    first = found[0]
    return RequestRefused(422, first.code, first.message, param=first.key or None, errors=found)


def internal() -> RequestRefused:
    """500; a caller can only report the request id."""
    return RequestRefused(500, "internal", "the service failed internally; its log says more under this request id")


def install(app: FastAPI) -> None:
    """Give the framework's refusals the one shape; all other errors pass up to `services.api.http.requests`."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = _from_validation(error, request.url.path)
        return error_response(translate(error), request.scope.get("request_id"))

    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)


def translate(error: Exception) -> RequestRefused:
    """The answer to any error."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, HTTPException):
        return _from_framework(error)
    later = unavailable(error)
    if later is not None:
        return RequestRefused(503, later.code, later.message, headers={"Retry-After": str(RETRY_AFTER_S)})
    for kind, (status, code, param) in _TRANSLATED.items():
        if isinstance(error, kind):
            return RequestRefused(status, code, str(error), param=param, headers=FINAL if status == 409 else None)
    return internal()


_TRANSLATED: Mapping[type[Exception], tuple[int, str, str | None]] = {
    JobNotFound: (404, "job_not_found", "id"),
    InvalidJobId: (404, "job_not_found", "id"),
    JobConflict: (409, "idempotency_conflict", "Idempotency-Key"),
    JobInUse: (409, "job_in_use", None),
    IllegalTransition: (409, "invalid_transition", None),
    InvalidCursor: (400, "invalid_cursor", "after"),
    EnvironmentNotFound: (404, "environment_not_found", "environment"),
    GroupNotKept: (404, "group_not_found", "group"),
    EpisodeNotKept: (404, "episode_not_found", "member"),
    EpisodeForgotten: (404, "episode_erased", None),
    DamagedBatchLog: (404, "batch_log_damaged", None),
}


def _from_framework(error: HTTPException) -> RequestRefused:
    known = {
        404: ("route_not_found", "there is no such route"),
        405: ("method_not_allowed", "this route does not support that method"),
    }
    code, message = known.get(error.status_code, ("invalid_request", str(error.detail)))
    return RequestRefused(error.status_code, code, message, headers=error.headers)


def _untagged(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Drop the kind of the source, which the validator inserts below `source`."""
    return (loc[0], *loc[2:]) if len(loc) > 2 and loc[0] == "source" else loc


def _from_validation(error: RequestValidationError, path: str) -> RequestRefused:
    """Errors in the body name a path of keys; all others name a flat parameter."""
    reports = list(error.errors())
    in_body = [
        cast(ErrorDetails, {**report, "loc": _untagged(report["loc"][1:])})
        for report in reports
        if report["loc"][0] == "body"
    ]
    if in_body:
        # Only job specifications offer names that may have been meant.
        return invalid(problems_of(in_body, JobSpec if path.startswith("/v1/jobs") else BaseModel, error.body))
    found = []
    for report in reports[:MAX_PROBLEMS]:
        name = spell(report["loc"][1:])
        if report["type"] == "extra_forbidden":
            found.append(Problem("unknown_parameter", report["loc"][1:], f"{name} is not a parameter of this route"))
        else:
            found.append(Problem("validation_failed", report["loc"][1:], f"{name}: {report['msg']}"))
    return invalid(found)
