"""One plain connection against bytes of all kinds. What its pools promise is tested with engines and with agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from gspo_core.http_connection import OLD_VERSION, VERSION, HttpConnection, NotHttp

ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def connected(answer: bytes, versions: Sequence[bytes] = (VERSION,)) -> AsyncIterator[HttpConnection]:
    """To a server that answers each request of one byte, and never closes."""

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            writer.write(answer)
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    made = partial(HttpConnection, versions=versions)
    _, line = await asyncio.get_running_loop().create_connection(made, host, port)
    async with server:
        yield line
        line.close()
        await ended.wait()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n0123456789",
        CHUNKED + b"3\r\n012\r\n9999999\r\n3456789",
        CHUNKED + b"5\r\n01234\r\n0\r\n\r\n",
        ENDLESS + b"0123456789",
    ],
)
async def test_no_more_of_an_answer_is_read_than_may_be(answer: bytes) -> None:
    """The rest may never come."""
    async with connected(answer) as line:
        assert (await line.exchange(b"?", most_bytes=5)).content == b"01234"
        assert not line.is_usable


async def test_what_is_said_before_an_answer_is_no_answer() -> None:
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"
    async with connected(b"HTTP/1.1 100 Continue\r\n\r\n" + answer) as line:
        for _ in range(2):
            found = await line.exchange(b"?")
            assert (found.status_code, found.content) == (200, b"OK")


async def test_the_old_version_is_answered_where_that_may_be_and_keeps_no_connection() -> None:
    answer = b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nOK"
    async with connected(answer, (VERSION, OLD_VERSION)) as line:
        assert (await line.exchange(b"?")).content == b"OK"
        assert not line.is_usable
    async with connected(answer) as line:
        with pytest.raises(NotHttp, match=r"HTTP/1\.0"):
            await line.exchange(b"?")
