"""One plain HTTP/1.1 connection, without asyncio's streams, which cost more than the exchange itself.

Rule: one exchange at a time; an exchange that does not end cleanly, or unexpected bytes, close it. It knows no URLs,
retries nothing and sets no time limits. It needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Generator
from dataclasses import dataclass

MAX_HEAD_BYTES = 2**16
VERSION, OLD_VERSION = b"HTTP/1.1", b"HTTP/1.0"
"""The old one keeps no connection."""

_Steps = Generator[None, None, "HttpAnswer"]
"""A parser that pauses wherever it needs more bytes."""


class NotHttp(ValueError):
    """The answer is not HTTP/1.1, or what else may be answered."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status_code: int
    content: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    keeps_connection: bool = True


class HttpConnection(asyncio.Protocol):
    """Made by ``create_connection``."""

    def __init__(self, *, versions: Collection[bytes] = (VERSION,)) -> None:
        """``versions``: of HTTP, in which it may be answered."""
        self._versions = versions
        self._buffer = bytearray()
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._reading: _Steps | None = None
        self._is_lost = False

    @property
    def is_usable(self) -> bool:
        return self._answer is None and not self._is_lost and not self._transport.is_closing()

    async def exchange(self, request: bytes, *, has_content: bool = True, most_bytes: int = sys.maxsize) -> HttpAnswer:
        """Raises ``NotHttp``, or ``OSError`` when the connection ends first. ``has_content`` is False for HEAD. Of a
        content that has more than ``most_bytes``, so many are given, and the connection is closed."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._reading = self._read(has_content, most_bytes)
        self._transport.write(request)
        try:
            found: HttpAnswer = await answer
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self._answer = self._reading = None
        if self._buffer or not found.keeps_connection:
            self._transport.close()
        return found

    def close(self) -> None:
        self._transport.close()

    # what the connection says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._reading is None:
            self._transport.abort()
        else:
            self._go_on(self._reading)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._reading is not None:
            self._go_on(self._reading)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("it was closed before the answer was whole"))

    def _go_on(self, reading: _Steps) -> None:
        assert self._answer is not None
        if self._answer.done():
            return
        try:
            next(reading)
        except StopIteration as end:
            self._answer.set_result(end.value)
        except (ValueError, LookupError) as error:
            self._answer.set_exception(NotHttp(str(error)))

    def _read(self, has_content: bool, most_bytes: int) -> _Steps:
        is_interim = True
        while is_interim:
            head = yield from self._until(b"\r\n\r\n")
            status_line, *lines = head.split(b"\r\n")
            version, status, *_ = status_line.split(b" ", 2)
            if version not in self._versions:
                raise ValueError(f"{version!r}")
            is_interim = status.startswith(b"1")
        headers = []
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name.lower(), value.strip()))
        fields = dict(headers)
        keeps = version != OLD_VERSION and fields.get(b"connection", b"").lower() != b"close"
        if not has_content or status in (b"204", b"304"):
            content = b""
        elif fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            content = yield from self._chunks(most_bytes)
            headers = [header for header in headers if header[0] != b"transfer-encoding"]
        elif b"content-length" in fields:
            content = yield from self._exactly(min(int(fields[b"content-length"]), most_bytes))
        else:
            content, keeps = (yield from self._rest(most_bytes)), False
        return HttpAnswer(int(status), content, tuple(headers), keeps and len(content) < most_bytes)

    def _until(self, mark: bytes) -> Generator[None, None, bytes]:
        """The bytes before ``mark``; consumes the mark too."""
        while (end := self._buffer.find(mark)) < 0 or end > MAX_HEAD_BYTES:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ValueError(f"more than {MAX_HEAD_BYTES} bytes of headers")
            yield
        found = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return found

    def _exactly(self, length: int) -> Generator[None, None, bytes]:
        if length < 0:
            raise ValueError(f"a length of {length}")
        while len(self._buffer) < length:
            yield
        found = bytes(self._buffer[:length])
        del self._buffer[:length]
        return found

    def _rest(self, most_bytes: int) -> Generator[None, None, bytes]:
        while not self._is_lost and len(self._buffer) < most_bytes:
            yield
        return (yield from self._exactly(min(len(self._buffer), most_bytes)))

    def _chunks(self, most_bytes: int) -> Generator[None, None, bytes]:
        chunks, num_left = [], most_bytes
        while size := int((yield from self._until(b"\r\n")).split(b";")[0], 16):
            chunks.append((yield from self._exactly(min(size, num_left))))
            num_left -= len(chunks[-1])
            if not num_left:
                return b"".join(chunks)
            yield from self._exactly(2)
        while (yield from self._until(b"\r\n")):
            pass  # trailers
        return b"".join(chunks)
