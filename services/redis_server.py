"""A Redis-compatible server at hand, and the one way to connect to it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from redis.asyncio import Redis


class RedisUnsuitable(RuntimeError):
    """No server that can keep our promises; the message says what was tried and what to do."""


class RedisServer:
    url: str

    @classmethod
    def start(cls, data_dir: Path, *, redis_url: str | None = None) -> Self:
        """Use ``redis_url`` (settings.redis_url) when given, else spawn a child with its data in ``data_dir/redis``."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def connect(url: str) -> Redis:
    """An asyncio client with our timeouts and retries; replies are bytes."""
    raise NotImplementedError
