"""Routers with all that their routes have in common, so that an application takes the routes as they are.

An application that includes routers builds each of their routes once more: a third of a second of each start.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends

from services.api.http.access import own_job
from services.api.http.document import V1
from services.api.http.errors import documented
from services.api.http.requests import StrictRoute


def v1_router(tag: str, prefix: str = "") -> APIRouter:
    """Routes of the API itself: below its version, each job for its owner alone."""
    return APIRouter(
        prefix=V1 + prefix,
        tags=[tag],
        route_class=StrictRoute,
        dependencies=[Depends(own_job)],
        responses=documented(400, 401, 403, 404, 422, 429, 503),
    )


def open_router(tag: str) -> APIRouter:
    """Routes that need no key."""
    return APIRouter(tags=[tag], route_class=StrictRoute, responses=documented(503))
