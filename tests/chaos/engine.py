"""The scripted engine with the script of a chaos run, over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.process.lifecycle import run_until_signalled
from tests.apparatus.scripted_engine.engine import Died, ScriptedEngine
from tests.apparatus.scripted_engine.protocol import answer
from tests.chaos.talk import CONTEXT_TOKENS, VOCABULARY, Talker


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(model_dir: Path, port: int, tick_s: float, stop: asyncio.Event) -> None:
    engine = ScriptedEngine(
        model_dir,
        vocab_size=VOCABULARY,
        context_length=CONTEXT_TOKENS,
        tick_s=tick_s,
        script=Talker(model_dir).script,
    )
    # What it was told to load may be gone when a trainer asks whether it fits: then this alone decides.
    engine.architectures = ["Qwen3ForCausalLM"]

    async def handle(request: Request) -> Response:
        try:
            status, body = await answer(
                engine, request.method, request.url.path, request.query_params, await request.body()
            )
        except Died:
            os._exit(1)
        return Response(body, status)

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
    config = uvicorn.Config(app, port=port, log_level="warning", access_log=False, lifespan="off")
    config.timeout_graceful_shutdown = 5  # as the embedded engine
    server = Server(config)
    ticking, serving = asyncio.create_task(engine.run()), asyncio.create_task(server.serve())
    await stop.wait()
    server.should_exit = True
    await engine.pause("abort")
    await serving
    ticking.cancel()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tick-ms", type=float, default=1.0)
    arguments = parser.parse_args()
    return run_until_signalled(lambda stop: serve(arguments.model, arguments.port, arguments.tick_ms / 1e3, stop))
