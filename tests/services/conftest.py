"""A real server for the whole test session, emptied before each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from services.bus import Bus
from services.redis_server import RedisServer, connect
from services.store import Claim, Store


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer.spawn(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def redis_client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def bus(redis_client: Redis) -> Bus:
    bus = Bus(redis_client)
    await bus.load_functions()
    return bus


@pytest.fixture
async def store(redis_client: Redis) -> Store:
    store = Store(redis_client)
    await store.load_functions()
    return store


@pytest.fixture
async def claim(store: Store) -> Claim:
    """A job that a trainer owns: its id and the token that fences the trainer's writes."""
    await store.create_job('{"name": "test"}')
    claim = await store.claim_job("trainer-0")
    assert claim is not None
    return claim
