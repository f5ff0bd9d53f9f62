"""``python -m tests.apparatus.scripted_engine --weights DIR [--port N]``: a scripted engine over HTTP, for tests of
others."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.process.lifecycle import run_until_signalled
from tests.apparatus.scripted_engine.engine import Died, ScriptedEngine
from tests.apparatus.scripted_engine.protocol import answer


async def serve(arguments: argparse.Namespace, stop: asyncio.Event) -> None:
    engine = ScriptedEngine(
        arguments.weights, seed=arguments.seed, profile=arguments.profile, tick_s=arguments.tick_ms / 1e3
    )
    engine.lies = arguments.lies

    async def handle(request: Request) -> Response:
        try:
            status, body = await answer(
                engine, request.method, request.url.path, request.query_params, await request.body()
            )
        except Died:
            os._exit(1)  # what ends a real engine ends this one
        return Response(body, status)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    app = Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])
    server = Server(uvicorn.Config(app, port=arguments.port, log_level="warning", access_log=False, lifespan="off"))
    ticking, serving = asyncio.create_task(engine.run()), asyncio.create_task(server.serve())
    await stop.wait()
    server.should_exit = True
    await engine.pause("abort")
    await serving
    ticking.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.apparatus.scripted_engine", description=__doc__)
    parser.add_argument("--weights", required=True, help="folder that its first weights are named after")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--seed", type=int, default=0, help="of what it says")
    parser.add_argument("--profile", default="0.5.23", help="version of the real server that it plays")
    parser.add_argument("--tick-ms", type=float, default=0.0, help="time between two tokens")
    parser.add_argument("--lies", action="store_true", help="take the labels of updates and keep the weights")
    arguments = parser.parse_args()
    return run_until_signalled(lambda stop: serve(arguments, stop))


if __name__ == "__main__":
    sys.exit(main())
