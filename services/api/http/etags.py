"""`ETag`, `If-Match` and `If-None-Match` of things that change.

Rule: a tag is a version, which changes when people change the thing, and a digest of the whole view. `If-Match`
compares the version alone: a job that has taken a step in between still has the settings that the caller has seen.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import Header, Response
from pydantic import BaseModel

from services.api.http.errors import FINAL, RequestRefused

_Tags = Header(max_length=2000, description="Tags of the resource, as given in the `ETag` of an answer, or `*`.")
IfMatch = Annotated[str | None, _Tags]
IfNoneMatch = Annotated[str | None, _Tags]


def tag_of(version: str | int, body: bytes) -> str:
    return f'"{version}.{hashlib.sha256(body).hexdigest()[:16]}"'


def tagged(view: BaseModel, version: str | int, if_none_match: str | None = None) -> Response:
    """The view with its tag, or 304 without a body for a caller that has it."""
    body = view.model_dump_json().encode()
    tag = tag_of(version, body)
    if if_none_match is not None and (if_none_match.strip() == "*" or tag in _listed(if_none_match)):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, headers={"ETag": tag}, media_type="application/json")


def require_match(if_match: str | None, version: str | int) -> None:
    """Raises RequestRefused 412: another caller has changed it."""
    if if_match is None or if_match.strip() == "*":
        return
    if not any(tag.startswith(f'"{version}.') for tag in _listed(if_match)):
        message = "it has changed since If-Match was read; read it again, then decide"
        raise RequestRefused(412, "precondition_failed", message, param="If-Match", headers=FINAL)


def _listed(tags: str) -> list[str]:
    return [tag.strip().removeprefix("W/") for tag in tags.split(",")]
