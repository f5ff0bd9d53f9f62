"""A line between a process and what it talks to, which is cut, loses, halves or delays what passes, on order.

It listens on a port of its own and carries bytes to a unix socket or another port. The rule kept here: a fault happens
when it is ordered, not by chance, and a line works again afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

PIECE = 1 << 18
Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


Change = Callable[[bytes], bytes | None]
"""Of what passes; None: this is not what it was meant for, and the order stands."""


def unchanged(data: bytes) -> bytes:
    return data


class Tap:
    """Reads along on one connection, and changes nothing."""

    def sent(self, data: bytes) -> None:
        """To whom the line leads, in a moment."""

    def came(self, data: bytes) -> None:
        """From there, and was passed on."""

    def closed(self) -> None:
        pass


@dataclass(frozen=True)
class Order:
    """What befalls the next request that holds ``mark``, or its answer."""

    mark: bytes
    fault: str = ""
    """``lose request``, ``lose reply``, ``halve reply``, or none of them."""
    request: Change = unchanged
    reply: Change = unchanged
    done: Callable[[], None] = field(default=lambda: None)
    """Told when it has happened."""
    kind: str = ""


def to_unix(path: str) -> Open:
    return lambda: asyncio.open_unix_connection(path)


def to_port(port: int) -> Open:
    return lambda: asyncio.open_connection("127.0.0.1", port)


class Line:
    """``port`` is where its user connects."""

    def __init__(self, upstream: Open) -> None:
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._orders: list[Order] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._num_stalls = 0
        self.mark = b""
        """What a request holds that is worth a fault."""
        self.tap: Callable[[], Tap] = Tap
        """One for each connection."""
        self.port = 0

    async def open(self) -> Line:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=PIECE)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def cut(self) -> int:
        """All connections, now; returns how many there were."""
        num = len(self._carrying)
        for task in self._carrying:
            task.cancel()
        return num

    def order(self, order: Order) -> None:
        self._orders.append(order)

    def is_ordered(self, kind: str) -> bool:
        """And has not happened yet."""
        return any(order.kind == kind for order in self._orders)

    def forget_orders(self) -> None:
        self._orders.clear()

    async def stall(self, seconds: float) -> None:
        """Nothing passes for so long."""
        self._num_stalls += 1
        self._flowing.clear()
        await asyncio.sleep(seconds)
        self._num_stalls -= 1
        if not self._num_stalls:
            self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._carrying.discard(task)
            writer.close()

    def _take(self, data: bytes) -> tuple[Order, bytes] | None:
        """The first order that this request is meant for, and what becomes of the request."""
        for place, order in enumerate(self._orders):
            if order.mark in data and (changed := order.request(data)) is not None:
                del self._orders[place]
                return order, changed
        return None

    def _changed_reply(self, order: Order, data: bytes) -> bytes:
        changed = order.reply(data)
        if changed is None:
            self._orders.append(order)
            return data
        order.done()
        return changed

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await self._upstream()
        struck: list[Order] = []
        tap = self.tap()

        async def forward() -> None:
            while data := await reader.read(PIECE):
                await self._flowing.wait()
                if found := self._take(data):
                    order, data = found
                    struck.append(order)
                    if order.reply is unchanged:
                        order.done()
                    if order.fault == "lose request":
                        return
                tap.sent(data)
                up_writer.write(data)
                await up_writer.drain()

        async def answer() -> None:
            while data := await up_reader.read(PIECE):
                await self._flowing.wait()
                order = struck[-1] if struck else None
                if order is not None and order.fault == "lose reply":
                    return
                if order is not None and order.fault == "halve reply":
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    return
                if order is not None and order.reply is not unchanged:
                    data = self._changed_reply(struck.pop(), data)
                writer.write(data)
                await writer.drain()
                tap.came(data)

        tasks = [asyncio.create_task(forward()), asyncio.create_task(answer())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            tap.closed()
            up_writer.close()
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """The other side learns of it at once and not by a timeout."""
    with contextlib.suppress(OSError):
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
