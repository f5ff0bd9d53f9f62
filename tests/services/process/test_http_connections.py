"""Clients that keep a server waiting: with their heads, their bodies, their reading, and their number."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from services.process import http_connections, http_server
from services.process.http_connections import ConnectionPatience, Crowd, Part
from services.process.listening import listen
from services.process.ports import free_port
from tests.patience import HANG_S

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
WAIT_S = HANG_S


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, and answers with as many bytes as the path asks for."""
    message: Any = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        if message["type"] == "http.disconnect":
            return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(int(scope["path"][1:] or 1)):
        await send({"type": "http.response.body", "body": b"y" * 65536, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class Served:
    def __init__(self, port: int) -> None:
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answer(self, sent: bytes) -> bytes:
        """Everything until the server closes."""
        reader, writer = await self.connect()
        writer.write(sent)
        try:
            return await asyncio.wait_for(reader.read(), WAIT_S)
        finally:
            writer.close()


@pytest.fixture
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """A server whose patience is short, with these bounds on its crowd."""
    for deadline in ("HEAD_S", "STANDSTILL_S"):
        monkeypatch.setattr(http_connections, deadline, 0.5)
    async with contextlib.AsyncExitStack() as stack:

        async def start(**bounds: int) -> Served:
            monkeypatch.setattr(http_server, "Crowd", lambda _: Crowd(**bounds))
            monkeypatch.setattr(http_server, "look_after", lambda all_: http_connections.look_after(all_, 0.05))
            port, stop = free_port(), asyncio.Event()
            serving = asyncio.create_task(
                http_server.serve_http(echo, "127.0.0.1", port, stop, grace_s=1, settings="", lifespan=False)
            )
            stack.push_async_callback(_end, serving, stop)
            await _listens(port)
            return Served(port)

        yield start


async def _end(serving: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()
    await serving


def test_an_answer_does_not_wait_for_acknowledgements() -> None:
    """Head and body are two writes: without TCP_NODELAY the second may take the 40 ms of a delayed acknowledgement."""
    with (
        listen("127.0.0.1", 0, "") as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def _listens(port: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.01)


async def send_until_it_has_gone(client: socket.socket) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            await asyncio.sleep(0.05)
            client.send(b"x")


async def read_chunks(reader: asyncio.StreamReader) -> None:
    """One answer, to its end."""
    await reader.readuntil(b"\r\n\r\n")
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


def told(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("sent", [GET[:-2], POST + b"beginning"], ids=["head", "body"])
async def test_a_request_that_stops_midway_is_refused_in_words(served: Callable[..., Any], sent: bytes) -> None:
    status, error = told(await (await served()).answer(sent))
    assert (status, error["code"]) == (408, "request_timeout")


async def test_a_connection_that_asks_for_nothing_is_closed_without_a_word(served: Callable[..., Any]) -> None:
    assert await (await served()).answer(b"") == b""


async def test_who_trickles_a_head_gets_no_more_time_for_it(served: Callable[..., Any]) -> None:
    reader, writer = await (await served()).connect()
    answer = asyncio.create_task(reader.read())
    writer.write(GET[:-2])
    async with asyncio.timeout(WAIT_S):
        while not answer.done():
            writer.write(b"x-more: y\r\n")
            await asyncio.sleep(0.02)
    with contextlib.suppress(ConnectionError):  # what was sent meanwhile may cut the answer off
        assert told(await answer)[0] == 408
    writer.close()


async def test_who_does_not_read_its_answer_is_cut(served: Callable[..., Any]) -> None:
    server = await served()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /4000 HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(ConnectionError):
            await send_until_it_has_gone(client)


async def test_the_oldest_of_too_many_open_heads_makes_room(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "HEAD_S", 3600)
    server = await served(max_connections=3)
    oldest = asyncio.create_task(server.answer(GET[:-2]))
    waiting = []
    async with asyncio.timeout(WAIT_S):
        while not oldest.done():
            waiting.append(await server.connect())
            await asyncio.sleep(0.02)
    assert len(waiting) >= 3
    assert told(await oldest)[0] == 408
    *_, (reader, writer) = waiting
    writer.write(GET)
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), WAIT_S)
    for _, one in waiting:
        one.close()


async def test_a_connection_that_rests_makes_room_for_one_that_asks(served: Callable[..., Any]) -> None:
    server = await served(max_connections=2)
    resting = [await server.connect() for _ in range(2)]
    for reader, writer in resting:
        writer.write(GET)
        await read_chunks(reader)
    reader, writer = await server.connect()
    writer.write(GET)
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), WAIT_S)
    assert await asyncio.wait_for(resting[0][0].read(), WAIT_S) == b""
    for _, one in (*resting, (reader, writer)):
        one.close()


async def test_beyond_the_bound_a_request_is_told_to_come_again(served: Callable[..., Any]) -> None:
    server = await served(max_connections=1)
    reader, writer = await server.connect()
    writer.write(b"GET /1000 HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readline()
    answer = await server.answer(GET)
    status, error = told(answer)
    assert (status, error["code"], error["retry_after_s"]) == (503, "too_many_connections", 5.0)
    assert b"retry-after: 5\r\n" in answer
    writer.close()


def test_bytes_that_come_earn_time_and_a_server_that_does_not_read_takes_none() -> None:
    waiting = ConnectionPatience()
    waiting.expect(Part.BODY)
    for _ in range(100):
        waiting.came(http_connections.LEAST_BYTES_PER_S)
        assert not waiting.is_late(1.0, is_reading=True)
    for _ in range(100):
        assert not waiting.is_late(1.0, is_reading=False)
    assert waiting.is_late(http_connections.STANDSTILL_S, is_reading=True)


def test_an_answer_that_is_read_slowly_but_steadily_goes_on() -> None:
    waiting, sent = ConnectionPatience(), 0
    for _ in range(100):
        sent += http_connections.LEAST_BYTES_PER_S
        assert not waiting.is_stuck(1.0, sent, 1000)
    assert waiting.is_stuck(http_connections.STANDSTILL_S + 1, sent, 1000)


class Guest:
    was_sent_away = False

    def look(self, seconds: float) -> None:
        raise AssertionError

    def give_way(self) -> None:
        self.was_sent_away = True


def test_a_full_house_makes_room_for_a_request_by_sending_away_who_rests_then_who_dawdles() -> None:
    crowd = Crowd(max_connections=3)
    resting, dawdling = Guest(), Guest()
    crowd.head_begins(dawdling)
    crowd.rests(resting)
    assert crowd.has_room(4)
    assert (resting.was_sent_away, dawdling.was_sent_away) == (True, False)
    assert crowd.has_room(4)
    assert dawdling.was_sent_away
    assert not crowd.has_room(4)
