"""A kill in a stream meets one that is really open, and what became of it is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.lines import Line, to_port
from tests.chaos.streams import CUT, WHOLE, Sampling, Stream, Streams, Wait, told, told_of
from tests.chaos.talk import Talker, write_tokenizer

RUN = "abcdef"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


class Server:
    """What it is to answer is put into ``says``; None closes the connection."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard.put_nowait(await reader.read(1 << 16))
        while (said := await self.says.get()) is not None:
            writer.write(said)
            await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, int]]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    yield made, listening.sockets[0].getsockname()[1]
    listening.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.005)


async def ask(line: Line) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.port)
    body = json.dumps({"messages": [{"role": "user", "content": f"task 700 {RUN}"}], "stream": True})
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n\r\n")
    await writer.drain()
    writer.write(body.encode())
    await writer.drain()
    return reader, writer


async def test_a_stream_is_open_from_its_first_event_to_its_last(tmp_path: Path, server: tuple[Server, int]) -> None:
    said, port = server
    streams, line = Streams(tmp_path / "streams.jsonl"), await Line(to_port(port)).open()
    line.tap = streams.tap
    reader, writer = await ask(line)
    said.says.put_nowait(HEAD)
    assert await reader.read(len(HEAD)) == HEAD
    assert streams.open == []
    said.says.put_nowait(b'data: {"one": 1}\n\n')
    await until(lambda: bool(streams.open))
    (stream,) = streams.open
    assert (stream.task, stream.run, stream.num_events, stream.end) == (700, RUN, 1, "")
    said.says.put_nowait(b"data: [DO")
    await reader.readuntil(b"[DO")
    assert streams.open == [stream]
    said.says.put_nowait(b"NE]\n\n")
    await until(lambda: not streams.open)
    assert stream.end == WHOLE
    assert not (tmp_path / "streams.jsonl").exists()
    said.says.put_nowait(None)
    writer.close()
    await line.close()


async def test_who_waits_strikes_what_is_open_and_what_became_of_it_is_noted(
    tmp_path: Path, server: tuple[Server, int]
) -> None:
    said, port = server
    streams, line = Streams(tmp_path / "streams.jsonl"), await Line(to_port(port)).open()
    line.tap = streams.tap
    met: list[tuple[list[str], int]] = []

    def strike(open_ones: list[Stream], number: int) -> bool:
        met.append(([one.run for one in open_ones], number))
        return len(met) > 1  # the first is not what it waits for

    streams.wait(Wait("kill gateway in a stream", 0.0, strike))

    async def strikes_are(number: int) -> None:
        await until(lambda: len(met) == number)

    for number in (1, 2):
        assert streams.is_awaited("kill gateway in a stream")
        _, writer = await ask(line)
        said.says.put_nowait(HEAD + b'data: {"one": 1}\n\n')
        await strikes_are(number)
        said.says.put_nowait(None)
        await until(lambda: not streams.open)
        writer.close()
    assert not streams.is_awaited("kill gateway in a stream")
    assert met == [([RUN], 0), ([RUN], 0)]
    (noted,) = [json.loads(one) for one in (tmp_path / "streams.jsonl").read_text().splitlines()]
    assert (noted["run"], noted["events"], noted["end"], noted["strikes"]) == (RUN, 1, CUT, [0])
    await line.close()


async def test_nobody_is_struck_where_the_stream_is_over_by_then(tmp_path: Path) -> None:
    streams = Streams(tmp_path / "streams.jsonl")
    struck: list[int] = []

    def strike(met: list[Stream], number: int) -> bool:
        struck.append(number)
        return True

    streams.wait(Wait("kill gateway in a stream", 0.01, strike))
    streams.began(stream := Stream(700, RUN))
    streams.ended(stream, WHOLE)
    await asyncio.sleep(0.05)  # nothing is to happen, which nothing tells
    assert struck == []
    assert streams.is_awaited("kill gateway in a stream")
    streams.forget()
    assert not streams.is_awaited("kill gateway in a stream")


async def test_a_stream_that_a_kill_has_doomed_is_not_met_again(tmp_path: Path) -> None:
    streams, met = Streams(tmp_path / "streams.jsonl"), list[list[str]]()

    def doom_the_first(open_ones: list[Stream], number: int) -> bool:
        met.append([one.run for one in open_ones])
        open_ones[0].is_doomed = True
        return True

    for run in ("first", "second"):
        streams.began(Stream(700, run))
    for _ in range(3):
        streams.wait(Wait("kill gateway in a stream", 0.0, doom_the_first))
    await until(lambda: len(met) == 2)
    await asyncio.sleep(0.05)  # nothing is to happen, which nothing tells
    assert met == [["first", "second"], ["second"]]
    assert streams.is_awaited("kill gateway in a stream")


async def test_an_engine_samples_for_a_run_until_it_answers(tmp_path: Path, server: tuple[Server, int]) -> None:
    said, port = server
    write_tokenizer(tmp_path / "model")
    codec = Talker(tmp_path / "model").codec
    sampling, line = Sampling(codec.tokenizer.decode), await Line(to_port(port)).open()
    line.tap = sampling.tap
    prompt = codec.render([{"role": "user", "content": f"task 700 {RUN}"}])
    body = json.dumps({"input_ids": prompt}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", line.port)
    writer.write(b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:5])
    await said.heard.get()
    assert sampling.runs == []
    writer.write(body[5:])
    await until(lambda: sampling.runs == [RUN])
    said.says.put_nowait(b"HTTP/1.1 200 OK\r\n\r\n{}")
    await until(lambda: sampling.runs == [])
    said.says.put_nowait(None)
    writer.close()
    await line.close()


def test_the_end_of_a_run_says_what_the_kills_met(tmp_path: Path) -> None:
    def kill(kind: str, strike: int, num_open: int, **more: Any) -> dict[str, Any]:
        return {"kind": f"kill {kind} in a stream", "strike": strike, "open": [{}] * num_open, **more}

    happened = [kill("gateway", 0, 2), kill("gateway", 1, 1), kill("engine", 2, 1, sampled=[RUN]), {"kind": "flushall"}]
    ended = [
        {"strikes": [0], "end": CUT},
        {"strikes": [0], "end": WHOLE},
        {"strikes": [1], "end": WHOLE},
        {"strikes": [2], "end": WHOLE},
    ]
    assert told(happened, ended) == [
        "kill engine in a stream: 1 times, 1 streams were open, of which 0 never came to their end on their connection "
        "and 1 did; 0 kills cut one; for 1 it sampled",
        "kill gateway in a stream: 2 times, 3 streams were open, of which 1 never came to their end on their "
        "connection and 2 did; 1 kills cut one",
    ]
    assert told_of(tmp_path) == []
