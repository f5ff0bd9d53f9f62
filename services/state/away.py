"""How Redis says no: the exceptions that every other room knows it by.

Duty: ``translate`` turns each error of the Redis library into one of ours. ``Away`` passes, by itself or once an
operator acts, so the same call may be made again; ``RedisFault`` does not pass. The rule: ``services.state.client``
translates at the one door, so no other room imports the library or reads its messages. Nothing here waits or retries.
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
    """Why Redis is away: the word that its reply begins with, or one of ours where there was no reply."""

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
    """Redis cannot be reached, or refuses for a while. Nothing is known of whether a call without a reply was done."""

    def __init__(self, reason: AwayReason, detail: str = "") -> None:
        super().__init__(f"{reason} {detail}" if detail else str(reason))
        self.reason = reason

    @property
    def has_answered(self) -> bool:
        """Whether the server is up and refused this call; otherwise it was not reached or is still starting."""
        return self.reason not in (AwayReason.UNREACHABLE, AwayReason.NO_CONNECTION, AwayReason.LOADING)


class OutOfMemory(Away):
    """The server has reached its ``maxmemory``; commits free some."""


class RedisFault(Exception):
    """Redis rejects a call for good: a mistake in this program or in the server's configuration."""


class CredentialsRefused(RedisFault):
    """The name or password in the server's URL is wrong, or missing."""


class NotPermitted(RedisFault):
    """The role that we log in as may not do this."""


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
# The library has no class for these, and leaves the word in the message.
_WORDS = {str(reason): reason for reason in AwayReason if reason not in (kind[1] for kind in _BY_CLASS)}
# A transaction that is refused as a whole says why only in its message.
_ABORTED = re.compile(r"because of: ([A-Z]+) ?(.*)", re.DOTALL)


def translate(error: Exception) -> Away | RedisFault:
    """Our exception for an error that the Redis library raised."""
    if type(error) is ConnectionError and isinstance(error.__cause__, RedisError):
        error = error.__cause__  # the greeting on a new connection was refused
    text = str(error)
    if isinstance(error, AuthenticationError | AuthorizationError):  # subclasses of ConnectionError
        return CredentialsRefused(text)
    if isinstance(error, NoPermissionError):
        return NotPermitted(text)
    if text == "No connection available.":  # a blocking pool has no class for it
        return Away(AwayReason.NO_CONNECTION, text)
    for kind, reason in _BY_CLASS:
        if isinstance(error, kind):
            return _away(reason, text)
    if isinstance(error, ExecAbortError) and (aborted := _ABORTED.search(text)):
        word, detail = aborted.groups()
        return _away(AwayReason(word), detail) if word in AwayReason.__members__ else RedisFault(text)
    word, _, detail = text.partition(" ")
    is_code = getattr(error, "status_code", None) is None  # otherwise the library has taken the code off
    return _away(_WORDS[word], detail) if is_code and word in _WORDS else RedisFault(text)


def _away(reason: AwayReason, detail: str) -> Away:
    return OutOfMemory(reason, detail) if reason is AwayReason.OOM else Away(reason, detail)
