"""Brings a real server into each state in which it refuses for a while, and out of it again."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from services.state.client import AwayReason, RedisClient, connect
from services.state.server import RedisServer

REAL = (
    AwayReason.UNREACHABLE,
    AwayReason.BUSY,
    AwayReason.OOM,
    AwayReason.MISCONF,
    AwayReason.READONLY,
    AwayReason.NOREPLICAS,
    AwayReason.MASTERDOWN,
)
"""What a single server can be brought to say."""


class Trouble:
    """One server with its data in ``directory``; ``begin`` and ``end`` are told the reason."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server = RedisServer.spawn(directory)
        self.url = self._server.url
        self._script: asyncio.Task[Any] | None = None

    def client(self) -> RedisClient:
        """One that does not try again by itself."""
        client = connect(self.url)
        client.set_retry(Retry(NoBackoff(), 0))
        return client

    async def begin(self, reason: AwayReason) -> None:
        match reason:
            case AwayReason.UNREACHABLE:
                self._server.close()
            case AwayReason.BUSY:
                await self._admin("CONFIG", "SET", "busy-reply-threshold", "10")
                self._script = asyncio.create_task(self._admin("EVAL", "while true do end", "0"))
                await self._until_busy()
            case AwayReason.OOM:
                await self._admin("CONFIG", "SET", "maxmemory", "1")
            case AwayReason.MISCONF:
                (self._directory / "dump.rdb").mkdir(exist_ok=True)  # no snapshot can be put in its place
                await self._admin("CONFIG", "SET", "save", "3600 1000000")
                await self._admin("BGSAVE")
                await self._until_snapshot_failed()
            case AwayReason.READONLY:
                await self._admin("REPLICAOF", "127.0.0.1", "1")
            case AwayReason.NOREPLICAS:
                await self._admin("CONFIG", "SET", "min-replicas-to-write", "1")
            case AwayReason.MASTERDOWN:
                await self._admin("CONFIG", "SET", "replica-serve-stale-data", "no", "replica-read-only", "no")
                await self._admin("REPLICAOF", "127.0.0.1", "1")
            case _:
                raise ValueError(reason)

    async def end(self, reason: AwayReason) -> None:
        match reason:
            case AwayReason.UNREACHABLE:
                self._server = RedisServer.spawn(self._directory)
            case AwayReason.BUSY:
                assert self._script is not None
                await self._admin("SCRIPT", "KILL")
                with contextlib.suppress(RedisError):
                    await self._script
            case AwayReason.OOM:
                await self._admin("CONFIG", "SET", "maxmemory", "0")
            case AwayReason.MISCONF:
                await self._admin("CONFIG", "SET", "save", "")
            case AwayReason.NOREPLICAS:
                await self._admin("CONFIG", "SET", "min-replicas-to-write", "0")
            case _:
                await self._admin("REPLICAOF", "NO", "ONE")

    def close(self) -> None:
        self._server.close()

    async def _until_busy(self) -> None:
        while True:
            try:
                await self._admin("PING")
            except RedisError as error:
                if str(error).startswith("BUSY "):
                    return
            await asyncio.sleep(0.01)

    async def _until_snapshot_failed(self) -> None:
        while b"rdb_last_bgsave_status:err" not in await self._admin("INFO", "persistence"):
            await asyncio.sleep(0.01)

    async def _admin(self, *command: str) -> bytes:
        """As the library's own client does it, whose replies are not ours to judge."""
        async with Redis.from_url(self.url, protocol=2, retry=None) as admin:
            admin.response_callbacks.clear()
            reply: bytes = await admin.execute_command(*command)
            return reply
