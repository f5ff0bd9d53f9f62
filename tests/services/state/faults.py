"""Faults for the tests of the queue: a line that breaks at random, a server that is killed again and again.

Everything is seeded; only processes that were started here are signalled.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from services.state.server import RedisServer
from tests.patience import HANG_S

FAULTS = ("lose request", "lose reply", "cut reply")


class FaultyLine:
    """A TCP proxy before a server on a unix socket. Every request meets one of FAULTS with probability ``rate``.

    The reply to the first request with one of ``surely`` in it is lost, whatever chance says.
    """

    def __init__(self, upstream: str, rate: float, seed: int, surely: Sequence[bytes] = ()) -> None:
        self._upstream = upstream.removeprefix("unix://")
        self._rate = rate
        self._random = random.Random(seed)
        self._surely = surely
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self.url = ""
        self.counts: Counter[str] = Counter()

    async def __aenter__(self) -> FaultyLine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        """After the clients are closed. No line outlives the proxy: one that is ended in the middle of its connecting
        leaves a socket open, which fails whatever test runs when that is found."""
        assert self._server is not None
        self._server.close()
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self._lines, return_exceptions=True)

    def _meet(self, data: bytes) -> str:
        if any(text in data for text in self._surely):
            self._surely = ()
            return "lose reply"
        return self._random.choice(FAULTS) if self._random.random() < self._rate else ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = asyncio.current_task()
        assert line is not None
        self._lines.add(line)
        line.add_done_callback(self._lines.discard)
        await self._carry(reader, writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)
        meeting = [""]

        async def forward() -> None:
            while data := await reader.read(1 << 20):
                self.counts["requests"] += 1
                meeting[0] = self._meet(data)
                self.counts[meeting[0] or "no fault"] += 1
                if meeting[0] == "lose request":
                    return
                up_writer.write(data)

        async def answer() -> None:
            while data := await up_reader.read(1 << 20):
                if meeting[0] == "lose reply":
                    return
                if meeting[0] == "cut reply":
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    return
                writer.write(data)

        tasks = [asyncio.create_task(forward()), asyncio.create_task(answer())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (writer, up_writer):
                end.close()
            await asyncio.gather(writer.wait_closed(), up_writer.wait_closed(), return_exceptions=True)


class MortalServer:
    """A server of its own directory that can be killed and started again; ``url`` stays the same."""

    def __init__(self, directory: Path, binary: Path) -> None:
        self._directory, self._binary = directory, binary
        self._server = RedisServer.spawn(directory, binary=binary)
        self.url = self._server.url

    def close(self) -> None:
        self._server.close()

    async def kill_and_restart(self) -> float:
        """Seconds from the kill until the server answers again with its data read back."""
        assert self._server.pid is not None
        started = time.monotonic()
        os.kill(self._server.pid, signal.SIGKILL)
        self._server.close()
        self._server = await asyncio.to_thread(RedisServer.spawn, self._directory, binary=self._binary)
        assert self._server.url == self.url
        return time.monotonic() - started


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)
