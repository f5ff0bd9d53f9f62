"""The one way to connect to Redis.

Duty: a client with our timeouts and retries. The rule: what it sends again after a lost reply must not matter twice, so
only reads, our functions and single idempotent commands go through it. It starts and examines no server.
"""

from __future__ import annotations

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError

SOCKET_TIMEOUT_S = 10.0
# A blocked read that lasts as long as the timeout of its socket is taken for a lost reply.
MAX_BLOCK_MS = 5000


def connect(url: str, *, max_connections: int = 512) -> redis.asyncio.Redis:
    """An asyncio client; replies are bytes. Close it with ``await client.aclose()``.

    A command whose reply is lost is sent again, for about ten seconds. Every blocked read holds one of the connections.
    """
    return redis.asyncio.from_url(
        url,
        protocol=2,
        max_connections=max_connections,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=5.0,
        health_check_interval=0,
        retry=Retry(ExponentialWithJitterBackoff(base=0.01, cap=1.0), 16),
        retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
    )
