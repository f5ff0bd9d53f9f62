"""Who is asked to leave while Redis does not answer has begun nothing, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.process.children import die_with_parent
from services.process.ports import free_port
from services.state.queue import Bus
from services.state.server import RedisServer

ROOT = Path(__file__).resolve().parents[3]
BEGUN_S = 120.0
LEFT_S = 60.0


class Muted:
    """A line to a server, which nothing passes any more once a request holds ``mark``."""

    def __init__(self, server: RedisServer, mark: bytes) -> None:
        self._path = server.url.removeprefix("unix://").partition("?")[0]
        self._mark = mark
        self.is_mute = asyncio.Event()
        self.port = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Muted]:
        async with await asyncio.start_server(self._carry, "127.0.0.1", 0) as listening:
            self.port = listening.sockets[0].getsockname()[1]
            yield self

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._path)
        answering = asyncio.create_task(self._pass_on(up_reader, writer, b"\0never"))
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):  # the test is over
            await self._pass_on(reader, up_writer, self._mark)
        answering.cancel()
        up_writer.close()
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mark: bytes) -> None:
        while data := await reader.read(1 << 16):
            if mark in data:
                self.is_mute.set()
            if not self.is_mute.is_set():
                writer.write(data)
                await writer.drain()


@contextmanager
def process(module: str, port: int, work: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    passed = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    given = {"GSPO_REDIS_URL": f"redis://127.0.0.1:{port}", "GSPO_DATA_DIR": str(work), "OMP_NUM_THREADS": "1"}
    with (work / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env={**passed, **given, **settings},
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent(),
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("module", "mark"),
    [
        ("services.rollout", b""),
        ("services.rollout", b"_join\r\n"),
        ("services.gateway", b""),
        ("services.gateway", b"agent_keys\r\n"),
        ("services.trainer", b""),
        ("services.trainer", b"installation"),
        ("services.api", b""),
        ("services.api", b"installation"),
    ],
)
async def test_who_waits_for_redis_at_its_start_leaves_in_order(
    module: str, mark: bytes, redis_server: RedisServer, redis_client: Redis, tmp_path: Path
) -> None:
    await Bus(redis_client).load_functions()
    settings = {"GSPO_GATEWAY_BIND": f"127.0.0.1:{free_port()}", "GSPO_API_PORT": str(free_port())}
    async with Muted(redis_server, mark).open() as line:
        with process(module, line.port, tmp_path, **settings) as child:
            async with asyncio.timeout(BEGUN_S):
                await line.is_mute.wait()
            child.send_signal(signal.SIGTERM)
            status = await asyncio.to_thread(child.wait, LEFT_S)
    assert status == 0, (tmp_path / "log").read_text()
