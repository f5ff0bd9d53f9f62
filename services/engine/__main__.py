"""``python -m services.engine --model DIR``: builds the embedded engine and serves it until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette

from services.engine.app import create_app
from services.engine.engine import EmbeddedEngine
from services.engine.kv_cache import budget_bytes
from services.engine.model import Decoder
from services.engine.protocol import GenerateReader
from services.engine.scheduler import Scheduler
from services.engines.keys import EngineKeys, KeyPair, NoKeyForEngine, is_routable, warning
from services.process.lifecycle import run_until_signalled, tell_of_root
from services.process.settings import Settings, SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger, tell_unread_settings

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> int:
    arguments = _parse()
    try:
        settings = load_settings()
        keys = _keys(settings, arguments.host, arguments.port)
    except (SettingsError, NoKeyForEngine) as error:
        print(f"services.engine: {error}", file=sys.stderr)
        return 2
    configure_logging("engine", level=settings.log_level, log_format=settings.log_format, port=arguments.port)
    tell_unread_settings()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    decoder = Decoder(
        arguments.model, device=device, dtype=_DTYPES[arguments.dtype], context_length=arguments.context_length
    )
    return run_until_signalled(functools.partial(_serve, arguments, decoder, keys), computes=True)


async def _serve(arguments: argparse.Namespace, decoder: Decoder, keys: KeyPair, stop: asyncio.Event) -> None:
    scheduler = Scheduler(
        decoder,
        max_concurrency=arguments.max_concurrency,
        prefix_cache_bytes=arguments.prefix_cache_mib * 2**20,
        kv_cache_bytes=_kv_cache_bytes(arguments),
        label=arguments.weight_version,
    )
    engine = EmbeddedEngine(decoder, scheduler, arguments.model)
    reader = GenerateReader(
        vocab_size=decoder.vocab_size,
        context_length=decoder.context_length,
        eos_ids=_eos_ids(decoder),
        engine_seed=arguments.random_seed,
    )
    info = {"max_running_requests": arguments.max_concurrency, "random_seed": arguments.random_seed}
    url = f"http://{arguments.host}:{arguments.port}"
    app = create_app(engine, reader, _text_decoder(arguments.model), info, keys)
    server = _server(app, arguments, lambda: get_logger().info("serving", url=url, model=arguments.model.name))
    async with asyncio.TaskGroup() as tasks:
        steps = tasks.create_task(engine.run(), name="steps")
        serving = tasks.create_task(server.serve(), name="http")
        stopping = tasks.create_task(stop.wait(), name="stop")
        tell_of_root()
        if keys == KeyPair() and is_routable(url):
            get_logger().warning(warning(url))
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        engine.pause("abort")  # every caller gets the tokens sampled for it so far
        server.should_exit = True
        await asyncio.wait({serving})
        steps.cancel()
        stopping.cancel()
    if not stop.is_set():
        raise RuntimeError(f"cannot listen on {arguments.host}:{arguments.port}")


def _kv_cache_bytes(arguments: argparse.Namespace) -> int:
    given = arguments.kv_cache_mib
    return budget_bytes(torch.device(arguments.device)) if given is None else given * 2**20


def _keys(settings: Settings, host: str, port: int) -> KeyPair:
    """Others may know this engine by the name of its machine."""
    return EngineKeys.read(settings.engine_keys).of_engine([host, socket.gethostname()], port)


def _server(app: Starlette, arguments: argparse.Namespace, tell: Callable[[], None]) -> uvicorn.Server:
    """``tell`` is called when it can be reached."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                tell()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # run_until_signalled handles signals

    return Server(
        uvicorn.Config(
            app,
            host=arguments.host,
            port=arguments.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=300,  # a client keeps its connections over a long weight load
            timeout_graceful_shutdown=5,
        )
    )


def _eos_ids(decoder: Decoder) -> frozenset[int]:
    eos = getattr(decoder.config, "eos_token_id", None)
    return frozenset(eos if isinstance(eos, list) else () if eos is None else (eos,))


def _text_decoder(model_dir: Path) -> Callable[[list[int]], str]:
    """For the ``text`` of answers; empty when the folder has no tokenizer."""
    if not (model_dir / "tokenizer.json").is_file():
        return lambda ids: ""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model folder with config.json and safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads per torch operation")
    parser.add_argument("--max-concurrency", type=int, default=128, help="requests that run at the same time")
    parser.add_argument("--context-length", type=int, help="default: the model's own limit")
    parser.add_argument("--prefix-cache-mib", type=int, default=512, help="memory for prefixes of finished requests")
    parser.add_argument(
        "--kv-cache-mib",
        type=int,
        help="memory for running requests; default: half of a free GPU, a quarter of a machine",
    )
    parser.add_argument("--weight-version", default="default", help="label of the initial weights")
    parser.add_argument("--random-seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
