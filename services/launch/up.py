"""``gspo up``: runs the whole stack until Ctrl-C, prints its addresses, and follows the logs of all processes.

It restarts processes that die; started again in the same directory, it resumes its jobs. If --engine-url or
GSPO_ENGINE_URLS names engines, it uses those and starts none.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gspo_core.cli.command import CommandError
from services.engines.acquaintance import Acquaintance, acquaint
from services.engines.kinds import kind_of
from services.engines.protocol import NoSuchKind
from services.files.data_dir import DataDir, HubKind, HubName
from services.files.disk_space import NoRoom
from services.files.hub import NotFetched, fetch
from services.launch import placement_options
from services.launch.engine_command import BRACES, FILLED, EngineCommand
from services.launch.gpus import torch_uses_gpus, visible_gpus
from services.launch.log_view import LogView
from services.launch.placement import PlacementError, described, parse_gpus
from services.launch.placement_options import check_engine, chosen_engine
from services.launch.retired import retired_names
from services.launch.stack import Stack, StackConfig, StackError, check_place, check_port, terminate_as_interrupt
from services.launch.supervisor import Supervisor
from services.launch.topology import PROCESSES
from services.process.children import die_with_parent
from services.process.own_secrets import hide_secrets
from services.process.settings import (
    PREFIX,
    Settings,
    SettingsError,
    engine_addresses,
    load_settings,
    unread_names,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CHECK_S = 0.5
NOT_OBEYED = {
    "api_host": "gspo up listens on loopback alone",
    **{one.bind: f"gspo up chooses where its {one.name} listens" for one in PROCESSES if one.bind},
    "health_file": "that is for one process, and gspo up starts several",
}
"""Settings of single processes that would otherwise be overruled without a word."""
# Makes the default model in a separate process, since the stack knows no examples.
DEMO_MODEL_MODULE = "examples.demo.model"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", help="data directory (default: $GSPO_DATA_DIR or .gspo)")
    parser.add_argument(
        "--model", help="model that the engine starts with (default: the demo model, created if missing)"
    )
    parser.add_argument(
        "--port", type=int, help="port of the API; 0 picks a free one (default: $GSPO_API_PORT or 8000)"
    )
    parser.add_argument(
        "--engine-url",
        nargs="+",
        default=(),
        metavar="URL",
        help="engines that already run; none is started (default: $GSPO_ENGINE_URLS)",
    )
    placement_options.add_engine(parser)
    placement_options.add_counts(parser)
    placement_options.add_plan(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0 after Ctrl-C or SIGTERM, or a plan, 1 if the stack could not start."""
    hide_secrets()
    try:
        with terminate_as_interrupt():
            settings = load_settings()
            config = _config(arguments, settings)
            tell_unread()
            check_port(config.port)
            if arguments.plan:
                print(described(config.members()))
                return 0
            if arguments.model:
                config = replace(config, model_dir=model_at(arguments.model, DataDir(config.data_dir)))
            check_place(config)
            _meet(config.engine_urls, settings)
            if not config.engine_urls:
                _provide_model(config.model_dir, make=arguments.model is None)
            serve(config)
    except KeyboardInterrupt:
        print("stopped; nothing is left running", flush=True)
        return 0
    except (StackError, SettingsError, PlacementError, CommandError) as error:
        print(f"gspo up: {error}", file=sys.stderr)
        return 1


def _config(arguments: argparse.Namespace, settings: Settings) -> StackConfig:
    """All but a model that is named, which may have to be fetched.

    Raises StackError, SettingsError, PlacementError, CommandError.
    """
    _refuse_unused(settings)
    root = Path(arguments.data_dir or settings.data_dir).resolve()
    urls = _engine_urls(arguments, settings)
    gpus = parse_gpus(arguments.gpus)
    devices = _devices(arguments, wanted=bool(gpus))
    keys = () if urls else settings.engine_keys
    filled = FILLED if keys else FILLED - {"config"}
    engine = None if urls else chosen_engine(arguments, on_gpu=bool(devices), has_keys=bool(keys), filled=filled)
    config = StackConfig(
        root,
        DataDir(root).model("calculator-tiny"),
        port=settings.api_port if arguments.port is None else arguments.port,
        rollout_workers=arguments.rollout_workers,
        engine_urls=urls,
        engine_keys=keys,
        trainers=arguments.trainers,
        engines=arguments.engines,
        devices=devices,
        gpus=gpus,
        engine=engine,
    )
    check_engine(engine, config.members())
    _check_program(engine)
    return config


def _refuse_unused(settings: Settings) -> None:
    """Raises StackError where a setting says what this command decides otherwise."""
    for name, instead in NOT_OBEYED.items():
        if name in settings.model_fields_set:
            raise StackError(f"{PREFIX}{name.upper()} is set, but {instead}: unset it")


def tell_unread() -> None:
    """Variables that may be meant for us, and are not read."""
    for name in unread_names(os.environ):
        print(f"{name} is set, and nothing here reads it", file=sys.stderr, flush=True)
    for name, instead in retired_names(os.environ).items():
        print(f"{name} is set, and no longer read: {instead}", file=sys.stderr, flush=True)


def _check_program(engine: EngineCommand | None) -> None:
    """Raises StackError."""
    if engine is not None and not BRACES.search(engine.words[0]) and shutil.which(engine.words[0]) is None:
        raise StackError(f"--engine {engine.words[0]}: there is no such program")


def _engine_urls(arguments: argparse.Namespace, settings: Settings) -> tuple[str, ...]:
    """Takes them from the option, or from GSPO_ENGINE_URLS. Raises StackError where something contradicts them."""
    try:
        given = engine_addresses(arguments.engine_url)
    except ValueError as error:
        raise StackError(f"--engine-url {' '.join(arguments.engine_url)}: {error}") from None
    if given and settings.engine_urls and set(given) != set(settings.engine_urls):
        raise StackError(
            f"--engine-url names {', '.join(given)}, GSPO_ENGINE_URLS {', '.join(settings.engine_urls)}: which is "
            f"meant? Unset one"
        )
    urls = given or settings.engine_urls
    try:
        for url in urls:
            kind_of(url)
    except NoSuchKind as error:
        raise StackError(str(error)) from None
    options = ("sglang", "sglang_python", "vllm", "vllm_python", "engine", "engines")
    started = [f"--{name.replace('_', '-')}" for name in options if getattr(arguments, name) is not None]
    if urls and started:
        source = "--engine-url" if given else "GSPO_ENGINE_URLS"
        raise StackError(
            f"{source} names engines that already run ({', '.join(urls)}), and {started[0]} would start others: "
            f"leave one of the two out"
        )
    return urls


def _meet(urls: Sequence[str], settings: Settings) -> None:
    """Raises StackError for what answers and cannot be used; one that is away may still come."""
    for known in asyncio.run(acquaint(urls, settings.engine_keys)) if urls else ():
        if known.acquaintance is Acquaintance.REFUSED:
            raise StackError(known.text)
        if known.acquaintance is Acquaintance.AWAY:
            print(f"{known.text}; it is waited for", flush=True)


def _devices(arguments: argparse.Namespace, *, wanted: bool) -> tuple[str, ...]:
    """The GPUs to divide: none where torch cannot use them, unless they are asked for. Raises StackError."""
    found = visible_gpus()
    if len(set(found)) < len(found):
        raise StackError(f"CUDA_VISIBLE_DEVICES names a GPU twice: {','.join(found)}")
    if torch_uses_gpus() or not found:
        return found
    if wanted:
        raise StackError("--gpus gives the trainer GPUs, which the torch here cannot use: install the build with CUDA")
    if arguments.sglang is not None or arguments.vllm is not None:
        name = "SGLang" if arguments.vllm is None else "vLLM"
        raise StackError(
            f"{name} would take GPUs ({', '.join(found)}) of which the torch here cannot use any for the trainer: "
            f"install the build with CUDA, or hide them with CUDA_VISIBLE_DEVICES="
        )
    return ()


def serve(config: StackConfig) -> NoReturn:
    """Start the stack and look after it until interrupted. Raises StackError if it cannot start."""
    stack = Stack(config)
    members = config.members()
    print(f"starting {', '.join(member.name for member in members)} ...", flush=True)
    if len(config.devices) or config.engine is not None or len(members) > len(stack.processes()):
        print(described(members), flush=True)
    if config.engine_urls:
        print(f"engines that already run: {', '.join(config.engine_urls)}", flush=True)
    logs = LogView(stack.log_dir)
    with stack:
        print(greeting(stack, config.model_dir), flush=True)
        try:
            look_after(stack, logs)
        except KeyboardInterrupt:
            print("stopping one after the other; Ctrl-C again kills what is left", flush=True)
            raise


def model_at(model: str, data_dir: DataDir) -> Path:
    """The directory of a model: as it is named, or of a name of the hub. Raises StackError."""
    directory, name = Path(model), HubName.parse(model)
    if directory.is_dir() or name is None:
        return directory.resolve()
    if (there := data_dir.hub.fetched(HubKind.MODEL, name)) is not None:
        return there
    if not load_settings().allow_downloads:
        raise StackError(
            f"there is no directory {model}. If it is a model of the Hugging Face hub, fetch it (gspo fetch {model}) "
            f"or allow this command to do so (GSPO_ALLOW_DOWNLOADS=true)"
        )
    print(f"fetching {name} ...", flush=True)
    try:
        return fetch(data_dir.hub, HubKind.MODEL, name)
    except (NotFetched, NoRoom) as error:
        raise StackError(str(error)) from error


def _provide_model(model_dir: Path, *, make: bool) -> None:
    """Raises StackError if there is no model and none can be made."""
    if not make:
        if not (model_dir / "config.json").exists():
            raise StackError(f"{model_dir} holds no model: it needs config.json and *.safetensors")
        return
    done = subprocess.run(
        [sys.executable, "-P", "-m", DEMO_MODEL_MODULE, str(model_dir)],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
        check=False,
    )
    if done.returncode != 0:
        raise StackError(done.stderr.strip() or f"cannot make the demo model: {DEMO_MODEL_MODULE} failed")


def look_after(stack: Stack, logs: LogView) -> NoReturn:
    """Show the logs and restart ended processes until interrupted."""
    from rich.text import Text

    console = _console()
    supervisor = Supervisor(stack, lambda line: console.print(Text(line, style="bold yellow"), soft_wrap=True))
    while True:
        for line in logs.news():
            show(console, line)
        supervisor.look()
        time.sleep(CHECK_S)


def show(console: Console, line: Text) -> None:
    """Print a line: cut to a terminal's width, whole to a file or pipe."""
    if console.is_terminal:
        console.print(line, no_wrap=True, overflow="ellipsis")
    else:
        console.print(line, soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def typed_gspo() -> str:
    """The gspo command to type in this shell: `make` activates no virtual environment."""
    return "gspo" if shutil.which("gspo") else os.path.relpath(Path(sys.executable).with_name("gspo"))


def greeting(stack: Stack, model_dir: Path) -> str:
    flag = "" if stack.api_url.endswith(":8000") else f" --url {stack.api_url}"
    own = f"{stack.engine_url}\nmodel   {model_dir}"
    given = f"{stack.engine_url}   (already running; none is started here)"
    return (
        f"viewer  {stack.api_url}/ui\n"
        f"API     {stack.api_url}   (described at {stack.api_url}/docs)\n"
        f"gateway {stack.gateway_url}   (for agents that play episodes)\n"
        f"engine  {given if stack.config.engine_urls else own}\n"
        f"logs    {stack.log_dir}   (all of them follow here)\n\n"
        f"submit a job with: {typed_gspo()} submit FILE{flag}\n"
        f"Ctrl-C stops everything; what is in {stack.config.data_dir} stays, and the next start continues from it.\n"
    )
