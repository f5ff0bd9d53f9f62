"""Bodies of requests: how much of them is read at once, what they may become, and where that is done."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp

from gspo_core.messages import CalledFunction, Message
from services.episodes import fingerprints
from services.episodes.fingerprints import of_messages
from services.gateway.dialects.turns import Refusal, RefusalKind, Turns
from services.gateway.http import bodies as bodies_module
from services.gateway.http.app import DIALECTS, build_app
from services.gateway.http.bodies import (
    FREE_BYTES,
    IN_THREAD_BYTES,
    MAX_BODY_BYTES,
    MAX_BYTES,
    MAX_BYTES_OF_ONE,
    MAX_NODES,
    SMALL_BODY_BYTES,
    Bodies,
    BodyTooLarge,
    has_more_nodes,
)
from tests.patience import HANG_S
from tests.services.gateway.agent_kit import door
from tests.services.gateway.fake_turns import KEY, FakeTurns, Scripted
from tests.services.gateway.gateway_kit import Bench
from tests.services.gateway.speakers import SPEAKERS, Speaker

EVERY = pytest.mark.parametrize("speaker", SPEAKERS.values(), ids=SPEAKERS)


def app_of(turns: Turns, bodies: Bodies | None = None) -> ASGIApp:
    return build_app(turns, is_ready=lambda: True, stopping=asyncio.Event(), bodies=bodies)


def client(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def asking(speaker: Speaker, text: str = "x") -> bytes:
    return json.dumps(speaker.body([{"role": "user", "content": text}])).encode()


class Sending:
    """A body whose second half comes when it is let."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.num_read = 0
        self.is_half_read = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        half = len(self._data) // 2
        self.num_read += half
        yield self._data[:half]
        self.is_half_read.set()
        await self.may_end.wait()
        self.num_read = len(self._data)
        yield self._data[half:]


@EVERY
@pytest.mark.parametrize("of_one", [True, False], ids=["one key", "all keys"])
async def test_bodies_that_are_read_at_once_have_so_many_bytes_together(speaker: Speaker, of_one: bool):
    size = len(asking(speaker)) + 10
    most, most_of_one = (10 * size, size) if of_one else (size, 10 * size)
    bodies = Bodies(most, most_of_one, free=0)
    async with client(app_of(FakeTurns(), bodies)) as http, asyncio.timeout(HANG_S):
        slow = [Sending(asking(speaker)), Sending(asking(speaker, "second"))]
        sending = [
            asyncio.create_task(http.post(speaker.url({}), content=one.__aiter__(), headers=speaker.headers))
            for one in slow
        ]
        await asyncio.gather(*(one.is_half_read.wait() for one in slow))
        refused = await http.post(speaker.url({}), content=asking(speaker), headers=speaker.headers)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error.get("type") or error["status"]) in ("rate_limit_error", "RESOURCE_EXHAUSTED")
        assert "being read" in speaker.error(refused.json())
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("5", "true")
        slow[0].may_end.set()  # it meets what the other one holds
        assert (await sending[0]).status_code == 429
        slow[1].may_end.set()
        assert (await sending[1]).status_code == 200
        assert (await http.post(speaker.url({}), content=asking(speaker), headers=speaker.headers)).status_code == 200
    assert not bodies._held


async def test_keys_whose_large_bodies_stand_still_shut_out_no_small_one_of_another():
    assert (MAX_BYTES_OF_ONE, MAX_BYTES) == (4 * MAX_BODY_BYTES, 16 * MAX_BODY_BYTES)
    speaker, bodies = SPEAKERS["chat"], Bodies()
    with contextlib.ExitStack() as stalled:
        for number in range(16):
            stalled.enter_context(bodies.of(f"key {number % 4}")).hold(MAX_BODY_BYTES - 2)
        async with client(app_of(FakeTurns(), bodies)) as http:
            data = asking(speaker, "x" * (FREE_BYTES - 1000))
            assert (await http.post(speaker.url({}), content=data, headers=speaker.headers)).status_code == 200
        with bodies.of("key 4") as large:
            large.hold(16 * FREE_BYTES)
            with pytest.raises(Refusal, match="too large together"):
                large.hold(2 * FREE_BYTES)
    assert (bodies._held, bodies._num_common) == ({}, 0)


async def test_a_body_no_longer_counts_once_its_turn_was_begun():
    speaker, gate = SPEAKERS["chat"], asyncio.Event()
    bodies, turns = Bodies(most_of_one=len(asking(SPEAKERS["chat"])) + 10), FakeTurns([Scripted("first", gate=gate)])
    async with client(app_of(turns, bodies)) as http, asyncio.timeout(HANG_S):
        first = asyncio.create_task(http.post(speaker.url({}), content=asking(speaker), headers=speaker.headers))
        while not turns.asks:
            await asyncio.sleep(0)
        assert (await http.post(speaker.url({}), content=asking(speaker), headers=speaker.headers)).status_code == 200
        gate.set()
        assert (await first).status_code == 200


async def made(data: bytes, make: Callable[[Any], Any], most: int = MAX_BODY_BYTES, told: int | None = None) -> Any:
    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    headers = [] if told is None else [(b"content-length", str(told).encode())]
    with Bodies().of(KEY) as body:
        return await body.read(Request({"type": "http", "headers": headers}, receive), make, most)


async def test_a_large_body_is_read_into_values_beside_the_event_loop():
    """And a small one without a detour."""
    here = threading.get_ident()
    small, large = json.dumps(["x"]).encode(), json.dumps(["x" * IN_THREAD_BYTES]).encode()
    assert await made(small, lambda value: (value[0], threading.get_ident())) == ("x", here)
    text, there = await made(large, lambda value: (value[0], threading.get_ident()))
    assert (text, there != here) == ("x" * IN_THREAD_BYTES, True)


async def test_large_bodies_are_read_into_values_one_after_the_other():
    data, both = json.dumps(["x" * IN_THREAD_BYTES]).encode(), threading.Barrier(2)

    def make(value: Any) -> bool:
        try:
            both.wait(timeout=0.05)
        except threading.BrokenBarrierError:
            return False
        return True

    async def receive() -> Any:
        return {"type": "http.request", "body": data, "more_body": False}

    bodies = Bodies()

    async def is_met() -> bool:
        with bodies.of(KEY) as body:
            return await body.read(Request({"type": "http", "headers": []}, receive), make)

    assert await asyncio.gather(is_met(), is_met()) == [False, False]


async def test_a_body_that_says_too_large_a_size_is_not_read():
    assert MAX_BODY_BYTES == 16 << 20
    with pytest.raises(BodyTooLarge, match=str(SMALL_BODY_BYTES)):
        await made(b"1", lambda value: value, most=SMALL_BODY_BYTES, told=SMALL_BODY_BYTES + 1)


async def test_a_body_that_would_become_too_many_values_is_refused_by_name_before_any_is_made():
    speaker = SPEAKERS["chat"]
    bombs = [b"[" + b"[]," * MAX_NODES + b"[]]", b"[" * (MAX_NODES + 1), b'[""' + b',""' * MAX_NODES + b"]"]
    async with client(app_of(FakeTurns())) as http:
        for bomb in bombs:
            answer = await http.post(speaker.url({}), content=bomb, headers=speaker.headers)
            assert answer.status_code == 400
            assert f"more than {MAX_NODES} values" in answer.json()["error"]["message"]
        deep = await http.post(speaker.url({}), content=b"[" * 70 + b"]" * 70, headers=speaker.headers)
        assert (deep.status_code, "nested deeper than" in deep.text) == (400, True)
        # What stands in a text is no value.
        text = '{"a": [1, 2]}, ' * (MAX_NODES // 4)
        answer = await http.post(speaker.url({}), content=asking(speaker, text), headers=speaker.headers)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("text", "num_nodes"),
    [
        ('["a", "b", "c"]', 6),  # a list, its signs, its texts
        ('["a, b, c", "[[["]', 4),
        (r'["a\", \"b", "\\", ","]', 6),
        ('{"content": "[1, 2, 3]"}', 3),
        ('{"arguments": "[1, 2, 3]"}', 6),
        ('{"argum\\u0065nts" : "[1, 2, 3]"}', 6),
        ('["arguments", "[1, 2, 3]"]', 4),
    ],
)
def test_values_are_counted_outside_of_texts_and_in_arguments(text: str, num_nodes: int):
    assert not has_more_nodes(text.encode(), num_nodes)
    assert has_more_nodes(text.encode(), num_nodes - 1)


def test_signs_are_counted_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    pieces = set[int]()

    class Noted(bytearray):
        def count(self, sign: Any, start: Any = 0, end: Any = None, /) -> int:
            pieces.add((len(self) if end is None else end) - start)
            return super().count(sign, start, end)

    monkeypatch.setattr(bodies_module, "_PIECE_BYTES", 3)
    text = b"[" + b"[1], " * 20 + b'"a, b"]'
    assert not has_more_nodes(Noted(text), 42)
    assert has_more_nodes(Noted(text), 41)
    assert max(pieces) == 3


def test_long_texts_are_digested_piece_by_piece_and_as_before(monkeypatch: pytest.MonkeyPatch):
    text = 'a "quoted" \\ line\n\x7f\u2028\U0001f600' * 2000 + "\ud800"
    call: CalledFunction = {"name": "f", "arguments": {"b": 1, "a": 2}}
    said: list[Message] = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]
    whole = of_messages(said)
    written: list[int] = []
    write = fingerprints._write

    def noted(value: object) -> str:
        written.append(len(value) if isinstance(value, str) else 0)
        return write(value)

    monkeypatch.setattr(fingerprints, "_PIECE_CHARS", 1000)
    monkeypatch.setattr(fingerprints, "_write", noted)
    assert of_messages(said) == whole
    assert max(written) == 1000
    as_before = json.dumps(["user", text], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert whole[0] == hashlib.blake2b(as_before.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@EVERY
async def test_the_key_of_an_episode_that_is_over_is_refused_before_its_body_is_read(codec: Any, speaker: Speaker):
    """So is one that a later attempt made void."""
    entrance = door()
    bench = Bench(codec)
    with entrance.open(bench.episode) as key:
        await bench.episode.seal()
    headers = {name: value.replace(KEY, key) for name, value in speaker.headers.items()}
    body = Sending(asking(speaker))
    async with client(app_of(entrance)) as http, asyncio.timeout(HANG_S):
        answer = await http.post(speaker.url({}), content=body.__aiter__(), headers=headers)
    assert (answer.status_code, body.num_read) == (409, 0)
    assert "has ended" in speaker.error(answer.json())
    with pytest.raises(Refusal) as refusal:
        await entrance.model_names(key)
    assert refusal.value.kind is RefusalKind.ENDED


@EVERY
async def test_an_open_stream_does_not_hold_the_history_that_it_answers(speaker: Speaker):
    question = DIALECTS[speaker.path].read(json.loads(asking(speaker, "x" * 1000)), {})
    slim = question.without_history()
    assert slim.ask.messages == ()
    assert "x" * 1000 not in str(slim)
    assert slim.model == question.model
