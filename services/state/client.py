"""The only way to connect to Redis: a client with our timeouts and retries, and our errors for when it fails.

The rules: it resends a command after a lost reply, so only reads, our functions and single idempotent commands may go
through it. After its own retries it raises only the exceptions of this module, which ``translate`` makes of the
library's: ``Away`` is temporary, perhaps until an operator acts, so the call may be repeated; ``RedisFault`` is
permanent. No other module reads the library's messages. It starts and inspects no server.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, NoReturn

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import HiredisRespSerializer
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

SOCKET_TIMEOUT_S = 10.0
# A blocked read as long as its socket's timeout looks like a lost reply.
MAX_BLOCK_MS = 5000


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
    NO_FUNCTIONS = "NO_FUNCTIONS"
    """The server lacks our functions, and those who may load them have not done it yet."""


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
# What an operator ended had written nothing: else the server would not have let it.
_KILLED = "Script killed by user"
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
    if text.startswith(_KILLED):
        return Away(AwayReason.BUSY, text)
    word, _, detail = text.partition(" ")
    is_code = getattr(error, "status_code", None) is None  # otherwise the library has stripped the code
    return _away(_WORDS[word], detail) if is_code and word in _WORDS else RedisFault(text)


def _away(reason: AwayReason, detail: str) -> Away:
    return OutOfMemory(reason, detail) if reason is AwayReason.OOM else Away(reason, detail)


class RedisClient(redis.asyncio.Redis):
    """Raises Away or RedisFault wherever the library raises an error of its own."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise translate(error) from error

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> RedisPipeline:
        return RedisPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def pubsub(self, **options: Any) -> NoReturn:
        """Refused: pub/sub messages would bypass the translation, and streams cover our needs."""
        raise NotImplementedError("use streams")

    def monitor(self) -> NoReturn:
        raise NotImplementedError("monitor the server with its own command line")


class RedisPipeline(Pipeline):
    """Raises the same errors as ``RedisClient``."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        try:
            replies: list[Any] = await super().execute(raise_on_error)
        except (RedisError, OSError) as error:
            raise translate(error) from error
        return [translate(reply) if isinstance(reply, RedisError) else reply for reply in replies]

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().immediate_execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise translate(error) from error

    def annotate_exception(self, exception: Exception, number: int, command: Any) -> None:
        """Add a note; the library would put its text before the word that identifies the error."""
        exception.add_note(f"command {number} of a pipeline: {command[0]}")


class _Packing:
    """Commands are written by hiredis, which the library uses for its blocking client alone: an append of many segments
    has hundreds of words."""

    _serializer = HiredisRespSerializer()

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = self._serializer.pack(*args)
        return packed


def _packing(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    return type(kind.__name__, (_Packing, kind), {})


def connect(url: str, *, max_connections: int = 512, wait_s: float | None = None) -> RedisClient:
    """An asyncio client; replies are bytes. Close it with ``await client.aclose()``.

    It resends a command whose reply is lost, for about ten seconds. Every blocked read holds a connection. When all are
    in use, a call waits up to ``wait_s`` for one; without ``wait_s`` it fails at once.
    """
    waiting = {} if wait_s is None else {"timeout": wait_s}
    kind = redis.asyncio.ConnectionPool if wait_s is None else redis.asyncio.BlockingConnectionPool
    pool = kind.from_url(
        url,
        **waiting,
        protocol=2,
        max_connections=max_connections,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5.0,
        health_check_interval=0,
        retry=Retry(ExponentialWithJitterBackoff(base=0.01, cap=1.0), 16),
        retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
    )
    pool.connection_class = _packing(pool.connection_class)
    client = RedisClient(connection_pool=pool)
    client.auto_close_connection_pool = True
    return client
