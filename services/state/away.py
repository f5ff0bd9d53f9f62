"""The exceptions that every other module sees when Redis fails.

Duty: ``translate`` maps each error of the Redis library to one of ours. ``Away`` is temporary, perhaps until an
operator acts, so the call may be repeated; ``RedisFault`` is permanent. The rule: ``services.state.client`` is the one
place that translates, so no other module imports the library or reads its messages. Nothing here waits or retries.
"""

from __future__ import annotations

import re
from enum import StrEnum

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    ExecAbortError,
    MasterDownError,
    MaxConnectionsError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
)


class AwayReason(StrEnum):
    """Why Redis is away: the first word of its reply, or one of ours if it did not reply."""

    UNREACHABLE = "UNREACHABLE"
    """No connection, or no reply in time."""
    NO_CONNECTION = "NO_CONNECTION"
    """All connections of this process are in use."""
    LOADING = "LOADING"
    BUSY = "BUSY"
    OOM = "OOM"
    MISCONF = "MISCONF"
    READONLY = "READONLY"
    NOREPLICAS = "NOREPLICAS"
    MASTERDOWN = "MASTERDOWN"
    CLUSTERDOWN = "CLUSTERDOWN"
    TRYAGAIN = "TRYAGAIN"
    UNBLOCKED = "UNBLOCKED"


class Away(Exception):
    """Redis is unreachable or refuses for now. A call without a reply may or may not have been executed."""

    def __init__(self, reason: AwayReason, detail: str = "") -> None:
        super().__init__(f"{reason} {detail}" if detail else str(reason))
        self.reason = reason

    @property
    def has_answered(self) -> bool:
        """Whether the server is up and refused this call; otherwise it was unreachable or is still starting."""
        return self.reason not in (AwayReason.UNREACHABLE, AwayReason.NO_CONNECTION, AwayReason.LOADING)


class OutOfMemory(Away):
    """The server has reached its ``maxmemory``; commits free memory."""


class RedisFault(Exception):
    """Redis permanently rejects a call: a bug in this program or in the server's configuration."""


class CredentialsRefused(RedisFault):
    """The name or password in the server's URL is wrong or missing."""


class NotPermitted(RedisFault):
    """Our login role lacks permission for this."""


# Subclasses first.
_BY_CLASS: tuple[tuple[type[Exception], AwayReason], ...] = (
    (BusyLoadingError, AwayReason.LOADING),
    (MaxConnectionsError, AwayReason.NO_CONNECTION),
    (ConnectionError, AwayReason.UNREACHABLE),
    (TimeoutError, AwayReason.UNREACHABLE),
    (OSError, AwayReason.UNREACHABLE),
    (OutOfMemoryError, AwayReason.OOM),
    (ReadOnlyError, AwayReason.READONLY),
    (MasterDownError, AwayReason.MASTERDOWN),
    (ClusterDownError, AwayReason.CLUSTERDOWN),
    (TryAgainError, AwayReason.TRYAGAIN),
)
# The library has no class for these; the word stays in the message.
_WORDS = {str(reason): reason for reason in AwayReason if reason not in (kind[1] for kind in _BY_CLASS)}
# A transaction refused as a whole gives the reason only in its message.
_ABORTED = re.compile(r"because of: ([A-Z]+) ?(.*)", re.DOTALL)


def translate(error: Exception) -> Away | RedisFault:
    """Our exception for an error raised by the Redis library."""
    if type(error) is ConnectionError and isinstance(error.__cause__, RedisError):
        error = error.__cause__  # the handshake of a new connection was refused
    text = str(error)
    if isinstance(error, AuthenticationError | AuthorizationError):  # subclasses of ConnectionError
        return CredentialsRefused(text)
    if isinstance(error, NoPermissionError):
        return NotPermitted(text)
    if text == "No connection available.":  # a blocking pool raises no class of its own
        return Away(AwayReason.NO_CONNECTION, text)
    for kind, reason in _BY_CLASS:
        if isinstance(error, kind):
            return _away(reason, text)
    if isinstance(error, ExecAbortError) and (aborted := _ABORTED.search(text)):
        word, detail = aborted.groups()
        return _away(AwayReason(word), detail) if word in AwayReason.__members__ else RedisFault(text)
    word, _, detail = text.partition(" ")
    is_code = getattr(error, "status_code", None) is None  # otherwise the library has stripped the code
    return _away(_WORDS[word], detail) if is_code and word in _WORDS else RedisFault(text)


def _away(reason: AwayReason, detail: str) -> Away:
    return OutOfMemory(reason, detail) if reason is AwayReason.OOM else Away(reason, detail)
