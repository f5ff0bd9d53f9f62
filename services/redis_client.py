"""The one way to connect to Redis.

Duty: a client with our timeouts and retries. The rule: what it sends again after a lost reply must not matter twice, so
only reads, our functions and single idempotent commands go through it. It starts and examines no server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

SOCKET_TIMEOUT_S = 10.0
# A blocked read that lasts as long as the timeout of its socket is taken for a lost reply.
MAX_BLOCK_MS = 5000
_NOT_NOW = (
    *(ConnectionError, TimeoutError, OutOfMemoryError, ReadOnlyError),
    *(ClusterDownError, MasterDownError, TryAgainError),
)
# Of errors that the client library has no class for: what it was asked is refused beside a full disk, without replicas,
# while another script runs.
_NOT_NOW_WORDS = ("MISCONF", "NOREPLICAS", "BUSY")


def is_away(error: BaseException) -> bool:
    """Whether Redis cannot be reached, or answers and refuses for a while: its memory is full, it is a replica now."""
    if isinstance(error, _NOT_NOW):
        return True
    return isinstance(error, ResponseError) and str(error).partition(" ")[0] in _NOT_NOW_WORDS


@contextlib.contextmanager
def unless_away() -> Iterator[None]:
    """Leaves the block when Redis is away, and says nothing."""
    try:
        yield
    except Exception as error:
        if not is_away(error):
            raise


def connect(url: str, *, max_connections: int = 512, wait_s: float | None = None) -> redis.asyncio.Redis:
    """An asyncio client; replies are bytes. Close it with ``await client.aclose()``.

    A command whose reply is lost is sent again, for about ten seconds. Every blocked read holds one of the connections.
    Where all are in use, ``wait_s`` is how long one is waited for; without it that is an error at once.
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
    return redis.asyncio.Redis.from_pool(pool)
