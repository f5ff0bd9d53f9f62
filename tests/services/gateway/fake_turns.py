"""Turns without episodes: answers are scripted, and everything that the HTTP side does with them is recorded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import httpx
from starlette.middleware import Middleware

from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, ToolCall
from services.episodes.policy import Span
from services.gateway.dialects.turns import Answer, Finish, Piece, Refusal, RefusalKind, TurnRequest, Usage
from services.gateway.http.app import build_app
from services.gateway.http.streams import Pace
from services.process.http_server import serve_http
from services.process.ports import free_port
from tests.patience import HANG_S

KEY = "ep_test.key"
MODEL = "policy"
USAGE = Usage(num_prompt_tokens=7, num_stored_tokens=5, num_sampled_tokens=3)


def call(name: str, arguments: JSON) -> ToolCall:
    return ToolCall(name, arguments, CallStatus.OK, "", 0, 0)


@dataclass(frozen=True)
class Scripted:
    """One turn. With a gate, nothing comes until it is open; with a refusal, that comes in place of the answer."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    finish: Finish | None = None
    stop_text: str = ""
    usage: Usage = USAGE
    pieces: tuple[Piece, ...] = ()
    gate: asyncio.Event | None = None
    refusal: Refusal | None = None
    num_behind: int = 0
    trace: str = ""
    left_out: tuple[str, ...] = ()

    def answer(self, number: int) -> Answer:
        return Answer(
            id=f"turn_{number}",
            text=self.text,
            calls=self.calls,
            call_ids=tuple(f"call_{number}_{index}" for index in range(len(self.calls))),
            finish=self.finish or ("tool_calls" if self.calls else "stop"),
            usage=self.usage,
            versions=(Span(0, 2, 4), Span(2, 3, 5)),
            created_at=1_700_000_000 + number,
            reasoning=self.reasoning,
            stop_text=self.stop_text,
            num_behind=self.num_behind,
        )


class FakeAnswering:
    def __init__(self, number: int, scripted: Scripted) -> None:
        self._scripted = scripted
        self._number = number
        self.answer = scripted.answer(number)
        self.id = self.answer.id
        self.created_at = self.answer.created_at
        self.num_prompt_tokens = self.answer.usage.num_prompt_tokens
        self.trace = scripted.trace
        self.left_out = scripted.left_out
        self.num_taken = 0
        self.fate: list[str] = []
        """``delivered`` and ``dropped``, as often as they were said."""
        self.ended = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Piece | Answer]:
        for piece in self._scripted.pieces:
            calls = tuple((call_id.format(self._number), call) for call_id, call in piece.calls)
            yield replace(piece, calls=calls)
            self.num_taken += 1
        if self._scripted.gate is not None:
            await self._scripted.gate.wait()
        if self._scripted.refusal is not None:
            raise self._scripted.refusal
        yield self.answer

    async def whole(self) -> Answer:
        return [one async for one in self if isinstance(one, Answer)][-1]

    async def delivered(self) -> None:
        self.fate.append("delivered")

    def dropped(self) -> None:
        self.fate.append("dropped")
        self.ended.set()


@dataclass
class FakeTurns:
    """Knows one key. Answers by the script, then echoes the last message."""

    script: list[Scripted | Refusal] = field(default_factory=list)
    names: tuple[str, ...] = (MODEL, "base")
    asks: list[TurnRequest] = field(default_factory=list)
    answerings: list[FakeAnswering] = field(default_factory=list)
    rewards: list[tuple[float, str, str]] = field(default_factory=list)
    says_unsupported: bool = False
    num_finished: int = 0
    num_counted: int = 0

    async def ask(self, key: str, ask: TurnRequest) -> FakeAnswering:
        self._admit(key)
        if ask.unsupported and not self.says_unsupported:
            raise ask.unsupported[0]
        self.asks.append(ask)
        scripted = self.script.pop(0) if self.script else Scripted(str(ask.messages[-1].get("content")))
        if isinstance(scripted, Refusal):
            raise scripted
        self.answerings.append(FakeAnswering(len(self.answerings), scripted))
        return self.answerings[-1]

    async def count_tokens(self, key: str, ask: TurnRequest) -> int:
        self._admit(key)
        self.num_counted += 1
        return len(ask.messages) * 10 + len(ask.tools)

    async def model_names(self, key: str) -> tuple[str, ...]:
        self._admit(key)
        return self.names

    async def reward(self, key: str, value: float, *, turn: str = "", token: str = "") -> None:
        self._admit(key)
        self.rewards.append((value, turn, token))

    async def finish(self, key: str) -> None:
        self._admit(key)
        self.num_finished += 1

    def _admit(self, key: str) -> None:
        if key != KEY:
            raise Refusal(RefusalKind.UNKNOWN_KEY, "no episode has this key")


@dataclass
class Gateway:
    url: str
    http: httpx.AsyncClient
    stopping: asyncio.Event
    is_ready: bool = True


@contextlib.asynccontextmanager
async def serving(
    turns: FakeTurns, pace: Pace | None = None, forwarding: Middleware | None = None
) -> AsyncIterator[Gateway]:
    """A gateway before these turns, on a port of this machine, as the process serves it."""
    stop, stopping, port = asyncio.Event(), asyncio.Event(), free_port()
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as http:
        gateway = Gateway(url, http, stopping)
        app = build_app(turns, is_ready=lambda: gateway.is_ready, stopping=stopping, pace=pace, forwarding=forwarding)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve_http(app, "127.0.0.1", port, stop, grace_s=1, settings="none", lifespan=False))
            try:
                await _until_it_answers(http)
                yield gateway
            finally:
                stop.set()


async def _until_it_answers(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(httpx.ConnectError):
                await http.get("/healthz")
                return
            await asyncio.sleep(0.01)


def schema(name: str, *parameters: str) -> JSON:
    """The parameters of a tool of the tests."""
    properties: dict[str, JSON] = {one: {"type": "number"} for one in parameters}
    return {"type": "object", "properties": properties, "required": [*parameters], "title": name}


def texts(pieces: Sequence[str], *, reasoning: bool = False) -> tuple[Piece, ...]:
    return tuple(Piece(reasoning=one) if reasoning else Piece(text=one) for one in pieces)
