"""The transport against servers that behave, and that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from services.engines.http_engine import open_http
from services.engines.transport import EngineTransport
from tests.patience import HANG_S


class Server:
    """Hands each request (head and body) to ``answer``, which returns bytes to send; b"" closes the connection."""

    def __init__(self, answer: Callable[[bytes, bytes], bytes]) -> None:
        self.answer = answer
        self.num_connections = 0
        self.url = ""
        self.closed = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length"))
                response = self.answer(head, await reader.readexactly(length))
                if not response:
                    break
                writer.write(response)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: Callable[[bytes, bytes], bytes]) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with open_http(max_connections=3) as http:
        yield server, http
    listener.close()
    await listener.wait_closed()


def ok(content: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(content), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + content


async def test_requests_arrive_whole_and_share_a_connection() -> None:
    seen = []

    def answer(head: bytes, body: bytes) -> bytes:
        seen.append((head.split(b"\r\n")[0], body))
        return ok(body * 2, b"X-Note: a: b")

    async with serving(answer) as (server, http):
        for size in (0, 3, 300_000):
            response = await http.post(f"{server.url}/p?q=1", content=b"x" * size)
            assert (response.status_code, response.content, response.headers["x-note"]) == (
                200,
                b"x" * 2 * size,
                "a: b",
            )
        assert server.num_connections == 1
    assert seen[0] == (b"POST /p?q=1 HTTP/1.1", b"")


async def test_an_engine_that_never_answers_takes_no_connection_from_another() -> None:
    asked: asyncio.Queue[bytes] = asyncio.Queue()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.put_nowait(await reader.read(1))
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with serving(lambda head, body: ok(body)) as (server, http):
        hanging = [asyncio.create_task(http.post(address, content=b"x")) for _ in range(3)]
        for _ in range(3):
            await asked.get()
        async with asyncio.timeout(HANG_S):
            assert (await http.post(server.url, content=b"y")).content == b"y"
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
    listener.close()
    await listener.wait_closed()


async def test_a_connection_is_not_kept_when_the_client_was_closed_while_it_was_in_use() -> None:
    asked, may_answer, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await may_answer.wait()
        writer.write(ok(b"late"))
        await reader.read()  # until the client has closed it
        left.set()
        writer.close()

    listener = await asyncio.start_server(slow, "127.0.0.1", 0)
    transport = EngineTransport(3)
    request = httpx.Request("POST", f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    asking = asyncio.create_task(transport.handle_async_request(request))
    await asked.wait()
    await transport.aclose()
    may_answer.set()
    assert (await asking).content == b"late"
    async with asyncio.timeout(HANG_S):
        await left.wait()
    listener.close()
    await listener.wait_closed()


async def test_concurrent_requests_have_connections_of_their_own_up_to_the_limit() -> None:
    async with serving(lambda head, body: ok(body)) as (server, http):
        answers = await asyncio.gather(*(http.post(server.url, content=b"%d" % number) for number in range(20)))
        assert [answer.content for answer in answers] == [b"%d" % number for number in range(20)]
        assert 1 < server.num_connections <= 3


async def test_chunked_compressed_and_endless_answers_are_read() -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nT: 1\r\n\r\n"
    )
    async with serving(lambda head, body: chunked) as (server, http):
        for _ in range(2):
            assert (await http.post(server.url)).content == b"abc0123456789"
        assert server.num_connections == 1
    async with serving(lambda head, body: ok(b"bye", b"Connection: close")) as (server, http):
        for _ in range(2):
            assert (await http.post(server.url)).content == b"bye"
        assert server.num_connections == 2


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    answers = [ok(b"1"), b"", ok(b"2")]
    async with serving(lambda head, body: answers.pop(0)) as (server, http):
        assert (await http.post(server.url)).content == b"1"
        with pytest.raises(httpx.ReadError):
            await http.post(server.url)
        assert (await http.post(server.url)).content == b"2"
        assert server.num_connections == 2


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", httpx.RemoteProtocolError),
        (b"SSH-2.0-server\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**17, httpx.RemoteProtocolError),
    ],
)
async def test_answers_that_are_no_http_are_told_apart(response: bytes, error: type[Exception]) -> None:
    async with serving(lambda head, body: response) as (server, http):
        with pytest.raises(error):
            await http.post(server.url)


async def test_a_cut_answer_a_late_one_and_no_server() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(b"0123456789")[:-3])
        writer.close()

    listener = await asyncio.start_server(cut, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with open_http() as http:
        with pytest.raises(httpx.ReadError):
            await http.post(url)
        listener.close()
        await listener.wait_closed()
        with pytest.raises(httpx.ConnectError):
            await http.post(url)
    async with serving(lambda head, body: b"HTTP/1.1 200 OK\r\n") as (server, http):
        with pytest.raises(httpx.ReadTimeout):
            await http.post(server.url, timeout=httpx.Timeout(60, read=0.05))
        await server.closed.wait()


async def test_a_cancelled_request_closes_its_connection() -> None:
    asked = asyncio.Event()

    def answer(head: bytes, body: bytes) -> bytes:
        asked.set()
        return b"HTTP/1.1 200 OK\r\n"

    async with serving(answer) as (server, http):
        call = asyncio.create_task(http.post(server.url))
        await asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(HANG_S):
            await server.closed.wait()
