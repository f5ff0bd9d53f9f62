"""A judge for tests: an OpenAI-compatible server of this machine that says what it is told to, in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gspo_core.outbound import parse_networks
from services.gateway.agent.judging import JudgeKeys, Judges
from services.gateway.agent.outbound_http import outbound_http
from services.process.http_server import serve_http
from services.process.ports import free_port
from tests.patience import HANG_S

LOOPBACK = ("127.0.0.0/8",)


@dataclass
class Says:
    """One answer. ``text`` is the judge's; with a ``status`` other than 200 it is the body."""

    text: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class JudgeServer:
    url: str
    answers: list[Says]
    """The last one stands for all that follow."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        return [one["messages"][0]["content"] for one in self.asked]

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        says = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if says.status != 200:
            return Response(says.text, says.status, says.headers)
        message = {"role": "assistant", "content": says.text}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        return JSONResponse({"choices": [{"index": 0, "message": message}], "usage": usage, "model": "j"})


@contextlib.asynccontextmanager
async def judge_server(answers: Sequence[Says]) -> AsyncIterator[JudgeServer]:
    port, stop = free_port(), asyncio.Event()
    server = JudgeServer(f"http://127.0.0.1:{port}/v1", list(answers))
    app = Starlette(routes=[Route("/v1/chat/completions", server.answer, methods=["POST"])])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_http(app, "127.0.0.1", port, stop, grace_s=1, settings="none", lifespan=False))
        try:
            async with asyncio.timeout(HANG_S):
                while not await _listens(port):
                    await asyncio.sleep(0.01)
            yield server
        finally:
            stop.set()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@contextlib.asynccontextmanager
async def judges(
    networks: Sequence[str] = LOOPBACK, keys: Sequence[str] = ()
) -> AsyncIterator[tuple[Judges, list[float]]]:
    """Judges, and how long each pause between two tries would have been."""
    paused: list[float] = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)

    async with outbound_http(parse_networks(networks)) as http:
        yield Judges(http, JudgeKeys(map(SecretStr, keys)), random.Random(0), pause), paused


def verdict(score: float) -> Says:
    return Says(json.dumps({"score": score}))
