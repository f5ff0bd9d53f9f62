"""Keys with scopes, for admins: made, listed, revoked. A key itself is shown once and never again."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from services.api.http import audit
from services.api.http.access import LOCAL, Caller
from services.api.http.context import ApiContext, ContextOf
from services.api.http.errors import FINAL, RequestRefused
from services.api.http.key_ring import SCOPES, KeyRecord, KeyRing
from services.api.http.listing import after_id
from services.api.http.routers import v1_router
from services.api.views.store_views import Page, View, page

router = v1_router("keys", "/keys")

DAY_S = 86_400.0


class KeyQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    scopes: str = "jobs:read,jobs:write,episodes:read"
    """What it may do, comma-separated: `jobs:read`, `jobs:write`, `envs:write`, `env:upload`, `episodes:read`,
    `episodes:play` (fetch episodes for agents), `admin`."""
    owner: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.@-]*$")] = ""
    """To whom the jobs that it submits belong; several keys may share an owner. Left out: the key itself."""
    days: Annotated[FiniteFloat, Field(gt=0, le=3650)] | None = None
    """How long it is valid; left out: until it is revoked."""


class KeyListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    """Length of a page."""
    after: str | None = None
    """Id of the item before the page."""


class KeyView(View):
    """A key, without its secret."""

    object: Literal["key"] = "key"
    id: str
    owner: str
    scopes: list[str]
    created_at: str
    expires_at: str | None


class NewKeyView(KeyView):
    """A key that was just made."""

    key: str
    """What to send as `Authorization: Bearer KEY`. It cannot be shown again."""


@router.post("", status_code=201)
async def make_key(
    query: Annotated[KeyQuery, Query()], request: Request, response: Response, context: ContextOf
) -> NewKeyView:
    """Make a key. From the first one on, this API requires one; so the first one of an API without keys must be an
    admin's that does not end, or no caller could make another."""
    scopes = [scope.strip() for scope in query.scopes.split(",") if scope.strip()]
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        message = f"{', '.join(unknown) or 'nothing'} is not a scope; known are {', '.join(SCOPES)}"
        raise RequestRefused(422, "validation_failed", message, param="scopes")
    caller: Caller = request.scope["caller"]
    if caller is LOCAL and ("admin" not in scopes or query.days is not None):
        message = (
            "this API has no keys, and the first one closes it to everyone without a key. So that it does not lock "
            "its operator out, the first key must be an admin key without expiry: POST /v1/keys?scopes=admin. "
            "Make further keys with it"
        )
        raise RequestRefused(409, "would_lock_out", message, param="scopes", headers=FINAL)
    lifetime_s = None if query.days is None else query.days * DAY_S
    record, key = await asyncio.to_thread(_ring(context).issue, query.owner, scopes, lifetime_s)
    response.headers["Cache-Control"] = "no-store"
    audit.changed("key", record.id, new=_said(record))
    return NewKeyView(**dict(_view(record)), key=key)


@router.get("")
async def list_keys(query: Annotated[KeyListQuery, Query()], context: ContextOf) -> Page[KeyView]:
    """The keys that are valid now, the oldest first, without those of the settings."""
    held = sorted(_ring(context).valid().values(), key=lambda one: (one.created_at, one.id))
    return page(after_id([_view(one) for one in held], query.after, query.limit), query.limit)


@router.delete("/{key}", status_code=204)
async def revoke_key(key: str, context: ContextOf) -> None:
    """Revoke a key, by its id, with immediate effect."""
    held = _ring(context).valid().get(key)
    if held is None or not await asyncio.to_thread(_ring(context).revoke, key):
        raise RequestRefused(404, "key_not_found", "no valid key has this id", param="key")
    audit.changed("key", key, old=_said(held))


def _ring(context: ApiContext) -> KeyRing:
    if context.ring is None:
        raise RequestRefused(404, "key_not_found", "this process has no data directory to keep keys in")
    return context.ring


def _said(record: KeyRecord) -> dict[str, Any]:
    """What the audit says of a key."""
    return _view(record).model_dump(include={"owner", "scopes", "expires_at"})


def _view(record: KeyRecord) -> KeyView:
    ends = None if record.expires_at is None else datetime.fromtimestamp(record.expires_at, UTC)
    return KeyView(
        id=record.id,
        owner=record.owner,
        scopes=list(record.scopes),
        created_at=record.created_at,
        expires_at=ends and ends.isoformat(timespec="seconds").replace("+00:00", "Z"),
    )
