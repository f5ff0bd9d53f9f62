"""A real server for the whole test session, emptied before each test.

A module marked ``every_server`` runs on each kind of server that is installed: Valkey (the wheel or on PATH), Redis (on
PATH, or unpacked by ``make debian-redis``). All others run on the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Set
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.process.cancelling import cancel_all
from services.state.queue import Bus
from services.state.server import RedisServer, connect
from services.state.store import Claim, Store
from tests.apparatus.redis_servers import servers

SERVERS = servers()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server_binary" in metafunc.fixturenames and metafunc.definition.get_closest_marker("every_server"):
        metafunc.parametrize("server_binary", SERVERS, indirect=True, scope="session")


@pytest.fixture(scope="session")
def server_binary(request: pytest.FixtureRequest) -> Path:
    """The program to start as a server."""
    name: str = getattr(request, "param", next(iter(SERVERS)))
    return SERVERS[name]


@pytest.fixture(scope="session")
def redis_server(server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer.spawn(tmp_path_factory.mktemp("redis"), binary=server_binary) as server:
        yield server


@pytest.fixture
async def redis_client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = connect(redis_server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def new_client(redis_server: RedisServer) -> AsyncIterator[Callable[[], Redis]]:
    """Makes further clients of the same server, each like one more process."""
    clients: list[Redis] = []

    def make() -> Redis:
        clients.append(connect(redis_server.url))
        return clients[-1]

    yield make
    for client in clients:
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
    await store.jobs.create('{"name": "test"}')
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    return claim


class LossyProxy:
    """A unix socket before the server. It can swallow the reply of a command, or the command itself, and cut the line.

    ``lose_reply`` names the requests (0 is the first) that contain ``needle`` whose reply never arrives, although the
    server has executed them; ``lose_request`` those that never reach the server.
    """

    def __init__(self, upstream: str, socket: Path) -> None:
        self.url = f"unix://{socket}"
        self._upstream = upstream.removeprefix("unix://")
        self._socket = socket
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self.needle = b""
        self.lose_reply: Set[int] = frozenset()
        self.lose_request: Set[int] = frozenset()
        self.num_seen = 0

    def disturb(
        self, needle: bytes, *, lose_reply: Set[int] = frozenset(), lose_request: Set[int] = frozenset()
    ) -> None:
        self.needle, self.lose_reply, self.lose_request, self.num_seen = needle, lose_reply, lose_request, 0

    async def __aenter__(self) -> LossyProxy:
        self._server = await asyncio.start_unix_server(self._take, self._socket)
        return self

    async def __aexit__(self, *error: object) -> None:
        """No line outlives it: a socket that is still open fails whatever test runs when that is found."""
        assert self._server is not None
        self._server.close()
        await cancel_all(list(self._lines))
        await asyncio.sleep(0)  # sockets are closed by the loop, soon

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.create_task(self._serve(reader, writer))
        self._lines.add(line)
        line.add_done_callback(self._lines.discard)
        line.add_done_callback(lambda _: writer.close())  # also where it is cancelled before its far end is reached

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
        swallow = asyncio.Event()

        async def forward() -> None:
            while data := await reader.read(1 << 20):
                if self.needle and self.needle in data:
                    number, self.num_seen = self.num_seen, self.num_seen + 1
                    if number in self.lose_request:
                        return
                    if number in self.lose_reply:
                        swallow.set()
                up_writer.write(data)

        async def answer() -> None:
            while data := await up_reader.read(1 << 20):
                if swallow.is_set():
                    return
                writer.write(data)

        tasks = [asyncio.create_task(forward()), asyncio.create_task(answer())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up_writer.close()
            await cancel_all(tasks)


@pytest.fixture
async def proxy(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(redis_server.url, tmp_path / "proxy.sock") as proxy:
        yield proxy


@pytest.fixture
async def lossy_client(proxy: LossyProxy, redis_client: Redis) -> AsyncIterator[Redis]:
    """Speaks to the server through the proxy; the server was emptied."""
    client = connect(proxy.url)
    yield client
    await client.aclose()
