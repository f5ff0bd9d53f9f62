"""Who may use the API, and for what.

One rule: every path that is not listed as open needs a key with the scope of its route, unless no key is configured,
which is allowed on loopback only. Without keys the caller must also be a program of this machine and not a web page in
its browser: names that only point at loopback, and requests of other origins, are refused. Keys are never stored,
logged or compared in the clear. A caller that is not an admin sees its own things only; for it the rest does not exist.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.http.brakes import Brakes
from services.api.http.context import ApiContext
from services.api.http.errors import RequestRefused, error_response
from services.api.http.key_ring import KeyRing
from services.api.http.limits import SharedRateLimit
from services.state.jobs import JobNotFound

# Health says nothing about jobs; the document of the routes is the same for everyone.
# The pages are an empty shell, the same for everyone; they fetch their content from the API with the visitor's key.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/metrics", "/", "/ui", "/docs"})
OPEN_FOLDER = "/ui/"
READING = frozenset({"GET", "HEAD", "OPTIONS"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ANONYMOUS = "local"


class AccessRefused(ValueError):
    """The settings would open the API to more than its rule allows."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. ``name`` is safe to log."""

    name: str
    owner: str
    """The owner of the jobs that it submits."""
    scopes: frozenset[str]

    @property
    def is_keyless(self) -> bool:
        """No keys are configured, so all callers are one."""
        return self is LOCAL

    @property
    def is_admin(self) -> bool:
        return "admin" in self.scopes

    def may(self, scope: str) -> bool:
        return self.is_admin or scope in self.scopes

    def sees(self, owner: str) -> bool:
        """Whether jobs of this owner exist for it."""
        return self.is_admin or owner == self.owner


LOCAL = Caller(ANONYMOUS, "", frozenset({"admin"}))


class Access:
    """The configured keys, as digests: they may do everything. Further ones, with scopes, are on the key ring."""

    def __init__(self, keys: Iterable[str] = (), ring: KeyRing | None = None, *, may_be_open: bool = True) -> None:
        """``may_be_open``: only this machine can reach the API, so it needs no key."""
        self._digests = tuple(_digest(key) for key in keys)
        self._ring = ring
        self._may_be_open = may_be_open

    @property
    def is_open(self) -> bool:
        """No key was ever made, so every caller may do everything. Keys that have ended open nothing."""
        return self._may_be_open and not self._digests and not (self._ring and self._ring.was_used())

    @property
    def has_keys(self) -> bool:
        """Keys that are valid now."""
        return bool(self._digests or (self._ring and self._ring.valid()))

    def admits(self, caller: Caller) -> bool:
        """Whether one who came in may stay: the key was neither revoked nor has it expired."""
        if caller.is_keyless:
            return self.is_open
        is_of_settings = caller.name in map(_name, self._digests)
        return is_of_settings or (self._ring is not None and caller.name in self._ring.valid())

    def caller(self, key: str) -> Caller:
        """The caller with this key; raises RequestRefused 401."""
        digest = _digest(key)
        # Every key is compared, so that timing reveals nothing about near misses.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        record = self._ring.find(key) if self._ring else None
        if any(matches):
            return Caller(_name(digest), "", frozenset({"admin"}))
        if record is None:
            raise _unauthorized("invalid_key", "this key is not known")
        return Caller(record.id, record.owner, frozenset(record.scopes))


def key_in(headers: Headers) -> str:
    """Raises RequestRefused 401 without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("missing_key", "send a key: Authorization: Bearer KEY")
    return key.strip()


def needed_scope(method: str, path: str) -> str:
    """The scope that a key must have."""
    if path.startswith("/v1/keys") or (path.startswith(("/v1/workers", "/v1/engines")) and method not in READING):
        return "admin"
    if _LEASES.match(path):
        return "episodes:play"
    if (_EPISODES.match(path) and method != "DELETE") or (_REPLAYS.match(path) and method in READING):
        return "episodes:read"
    if path.startswith("/v1/environments") and method not in READING:
        return "env:upload" if path == "/v1/environments/uploads" else "envs:write"
    return "jobs:read" if method in READING and not _WEIGHTS.match(path) else "jobs:write"


_LEASES = re.compile(r"/v1/jobs/[^/]+/(episodes:lease$|leases/)")
# Their answers may show episodes token by token; asking costs computing time.
_REPLAYS = re.compile(r"/v1/jobs/[^/]+/replays(/|$)")
# Who may have a model written may have it.
_WEIGHTS = re.compile(r"/v1/checkpoints/[^/]+/[^/]+/[^/]+/export/files(/|$)")
_EPISODES = re.compile(r"/v1/(groups|episodes)(/|$)|/v1/jobs/[^/]+/(groups|episodes|traces)([/.]|$)")


async def own_job(request: Request) -> None:
    """In front of every route; one that names a job calls it `id` or `job`. Raises JobNotFound for those of others."""
    caller: Caller = request.scope["caller"]
    job = request.path_params.get("id") or request.path_params.get("job")
    if job is None or caller.is_admin:
        return
    context: ApiContext = request.app.state.context
    if not caller.sees((await context.store.jobs.get(job)).owner):
        raise JobNotFound(job)


def require_safe_bind(host: str, access: Access) -> None:
    """Raises AccessRefused for an address that other machines can reach, unless there are keys."""
    if not access.has_keys and not is_loopback(host):
        raise AccessRefused(
            f"GSPO_API_HOST={host} can be reached by others, but GSPO_API_KEYS is empty: anyone could submit jobs, "
            "which run code. Set GSPO_API_KEYS, or bind 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class AccessMiddleware:
    """Refuses a request before its route or body is read; puts the caller into the request's scope,
    and a way to ask whether it is still admitted."""

    def __init__(self, app: ASGIApp, access: Access, limit: SharedRateLimit, brakes: Brakes) -> None:
        self._app = app
        self._access = access
        self._limit = limit
        self._brakes = brakes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            try:
                await self._admit(scope)
            except RequestRefused as error:
                await error_response(error, scope.get("request_id"))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        _refuse_foreign_pages(headers, must_be_local=self._access.is_open)
        caller = LOCAL if self._access.is_open else self._known(key_in(headers), scope)
        scope["caller"], scope["credential"] = caller, caller.name
        scope["is_admitted"] = partial(self._access.admits, caller)
        needed = needed_scope(scope["method"], scope["path"])
        if not caller.may(needed):
            raise RequestRefused(403, "scope_required", f"this key does not have the scope {needed}")
        context: ApiContext = scope["app"].state.context
        wait_s = 0 if caller is LOCAL else await self._limit.wait_s(caller.name, context.functions)
        if wait_s:
            message = f"too many requests with this key; try again in {wait_s} s"
            raise RequestRefused(429, "too_many_requests", message, headers={"Retry-After": str(wait_s)})

    def _known(self, key: str, scope: Scope) -> Caller:
        """Whose key it is. Raises RequestRefused 401, and 429 where too many wrong ones came."""
        client = scope.get("client")
        address = client[0] if client else ""
        wait_s = self._brakes.wait_s(address, key)
        if wait_s and not self._brakes.is_above_suspicion(key):
            raise _braked(wait_s)
        try:
            caller = self._access.caller(key)
        except RequestRefused:
            self._brakes.was_wrong(address, key)
            if wait_s:
                raise _braked(wait_s) from None
            raise
        self._brakes.was_right(key)
        return caller


def _braked(wait_s: int) -> RequestRefused:
    message = (
        f"too many wrong keys came from this address, or began like this one; this key was not looked at, or is wrong "
        f"as well; try again in {wait_s} s"
    )
    return RequestRefused(429, "too_many_wrong_keys", message, headers={"Retry-After": str(wait_s)})


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _refuse_foreign_pages(headers: Headers, *, must_be_local: bool) -> None:
    host = headers.get("host", "")
    if must_be_local and _parts(f"//{host}")[0] not in LOCAL_NAMES:
        raise RequestRefused(
            403, "host_not_allowed", f"without keys this API answers only to loopback names, not to {host[:100]!r}"
        )
    origin = headers.get("origin")
    if origin is not None and _parts(origin)[1] != host:
        raise RequestRefused(403, "origin_not_allowed", "web pages of other origins may not use this API")


def _parts(url: str) -> tuple[str, str]:
    """Name and network location of an address; empty if it is not one."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").lower(), parts.netloc
    except ValueError:
        return "", ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _name(digest: bytes) -> str:
    return digest.hex()[:12]


def _unauthorized(code: str, message: str) -> RequestRefused:
    return RequestRefused(401, code, message, headers={"WWW-Authenticate": "Bearer"})
