"""The scripted engine with the script of a chaos run, over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
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
from tests.chaos.receiver import Receiver
from tests.chaos.talk import CONTEXT_TOKENS, VOCABULARY, Talker


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Engine(ScriptedEngine):
    """Writes down what the weights that it was told to load are made of."""

    loads: Path | None = None
    received: dict[str, str] | None = None
    """What is to be written down of the next weights; None: what their folder holds."""

    async def update(self, weights: str, label: str | None, *, flush: bool) -> None:
        if self.loads is not None:
            found, self.received = self.received, None
            found = found or await asyncio.to_thread(digests, Path(weights))
            with self.loads.open("a") as file:
                file.write(json.dumps({"label": label, "path": weights, "files": found}) + "\n")
        await super().update(weights, label, flush=flush)


def digests(folder: Path) -> dict[str, str]:
    """Of each file; what is removed meanwhile is left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


async def serve(
    model_dir: Path,
    port: int,
    tick_s: float,
    stop: asyncio.Event,
    *,
    loads: Path | None = None,
    data: Path | None = None,
) -> None:
    engine = Engine(
        model_dir,
        vocab_size=VOCABULARY,
        context_length=CONTEXT_TOKENS,
        tick_s=tick_s,
        script=Talker(model_dir).script,
    )
    engine.loads = loads
    # What it was told to load may be gone when a trainer asks whether it fits: then this alone decides.
    engine.architectures = ["Qwen3ForCausalLM"]

    receiver = Receiver(engine, model_dir, data) if data is not None else None

    async def handle(request: Request) -> Response:
        if receiver and (answered := await receiver.answer(request.url.path, await request.body())):
            return Response(answered[1], answered[0])
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
    parser.add_argument("--loads", type=Path, default=None, help="where to write down what was loaded")
    parser.add_argument("--data", type=Path, default=None, help="of the service: takes weights over a group too")
    given = parser.parse_args()
    return run_until_signalled(
        lambda stop: serve(given.model, given.port, given.tick_ms / 1e3, stop, loads=given.loads, data=given.data)
    )


if __name__ == "__main__":
    raise SystemExit(main())
