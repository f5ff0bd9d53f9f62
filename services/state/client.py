"""The only way to connect to Redis.

Duty: a client with our timeouts, retries and errors. The rules: it resends a command after a lost reply, so only reads,
our functions and single idempotent commands may go through it; and after its own retries it raises only the exceptions
of ``services.state.away``. It starts and inspects no server.
"""

from __future__ import annotations

from typing import Any, NoReturn

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import HiredisRespSerializer
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError

from services.state.away import translate

SOCKET_TIMEOUT_S = 10.0
# A blocked read as long as its socket's timeout looks like a lost reply.
MAX_BLOCK_MS = 5000


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
