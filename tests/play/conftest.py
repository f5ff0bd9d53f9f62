from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.state.client import connect
from services.state.server import RedisServer


@pytest.fixture
async def redis_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    # Calls of an outbox keep a distance, which would be most of the time of many short episodes.
    monkeypatch.setattr("services.episodes.outbox.DISTANCE_S", 0.0)
    with RedisServer.spawn(tmp_path) as server:
        client = connect(server.url)
        yield client
        await client.aclose()
