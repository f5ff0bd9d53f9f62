"""What the HTTP server writes within one turn of the event loop leaves as one."""

from __future__ import annotations

import asyncio

from services.process.http_server import MAX_GATHERED_BYTES, Gathered


class Wire(asyncio.Transport):
    """Remembers what was written, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def test_a_head_leaves_with_its_body() -> None:
    wire = Wire()
    gathered = Gathered(wire)
    gathered.write(b"head ")
    gathered.write(b"body")
    assert wire.written == []
    await asyncio.sleep(0)
    assert wire.written == [b"head body"]
    gathered.write(b"next")
    gathered.flush()
    assert wire.written[1:] == [b"next"]
    await asyncio.sleep(0)
    assert wire.written[1:] == [b"next"]


async def test_much_leaves_at_once() -> None:
    wire = Wire()
    gathered = Gathered(wire)
    gathered.write(b"head")
    gathered.write(bytes(MAX_GATHERED_BYTES))
    assert [len(one) for one in wire.written] == [MAX_GATHERED_BYTES + 4]


async def test_what_was_written_before_the_end_leaves_and_nothing_after_it() -> None:
    wire = Wire()
    gathered = Gathered(wire)
    gathered.write(b"the last word")
    gathered.close()
    assert (wire.written, wire.is_closed) == ([b"the last word"], True)
    gathered.write(b"too late")
    await asyncio.sleep(0)
    assert wire.written == [b"the last word"]
