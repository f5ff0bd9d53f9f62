"""Who may use the API.

One rule: whatever is not listed as open needs a key, unless no key is configured, which is allowed on loopback only.
Without keys the caller must also be a program of this machine and not a web page in its browser: names that only point
at loopback, and requests of other origins, are refused. Keys are never stored, logged or compared in the clear.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.errors import ApiError, error_response

# Health says nothing about jobs; the document of the routes is the same for everyone.
# The pages are an empty shell, the same for everyone; what they show they ask the API for, with the key of who looks.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/metrics", "/ui", "/docs"})
OPEN_FOLDER = "/ui/"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ANONYMOUS = "local"


class AccessRefused(ValueError):
    """The settings would open the API to more than its rule allows."""


class Access:
    """The configured keys, as digests."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    @property
    def is_open(self) -> bool:
        """Without keys; then only loopback may be served."""
        return not self._digests

    def credential(self, headers: Headers) -> str:
        """Who asks, as a short name that is safe to log; raises ApiError 401."""
        if self.is_open:
            return ANONYMOUS
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("missing_key", "send a key: Authorization: Bearer KEY")
        digest = _digest(key.strip())
        # Every key is compared, so that the time tells nothing about which one came close.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise _unauthorized("invalid_key", "this key is not known")
        return digest.hex()[:12]


def require_safe_bind(host: str, access: Access) -> None:
    """Raises AccessRefused for an address that others can reach, unless there are keys."""
    if access.is_open and not is_loopback(host):
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
    """Refuses before a route or a body is looked at; leaves the credential in the request's scope."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"]):
            headers = Headers(scope=scope)
            try:
                _refuse_foreign_pages(headers, must_be_local=self._access.is_open)
                scope["credential"] = self._access.credential(headers)
            except ApiError as error:
                await error_response(error, scope.get("request_id"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _refuse_foreign_pages(headers: Headers, *, must_be_local: bool) -> None:
    host = headers.get("host", "")
    if must_be_local and _parts(f"//{host}")[0] not in LOCAL_NAMES:
        raise ApiError(
            403, "host_not_allowed", f"without keys this API answers on loopback names only, not as {host[:100]!r}"
        )
    origin = headers.get("origin")
    if origin is not None and _parts(origin)[1] != host:
        raise ApiError(403, "origin_not_allowed", "web pages of other origins may not use this API")


def _parts(url: str) -> tuple[str, str]:
    """Name and network location of an address, empty for what is none."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").lower(), parts.netloc
    except ValueError:
        return "", ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(code: str, message: str) -> ApiError:
    return ApiError(401, code, message, headers={"WWW-Authenticate": "Bearer"})
