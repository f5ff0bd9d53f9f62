"""``gspo up``: runs the whole stack until Ctrl-C, prints its addresses, and follows the logs of all processes.

It restarts processes that die; started again in the same directory, it resumes its jobs. If GSPO_ENGINE_URLS names
engines, it uses those and starts none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from services.files.data_dir import DataDir, HubKind, HubName
from services.files.disk_space import NoRoom
from services.files.hub import NotFetched, fetch
from services.launch.log_view import LogView
from services.launch.stack import Stack, StackConfig, StackError, check_place, terminate_as_interrupt
from services.launch.supervisor import Supervisor
from services.process.children import die_with_parent
from services.process.settings import SettingsError, load_settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CHECK_S = 0.5
# Makes the default model in a separate process, since the stack knows no examples.
DEMO_MODEL_MODULE = "examples.demo.model"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", help="data directory (default: $GSPO_DATA_DIR or .gspo)")
    parser.add_argument(
        "--model", help="model that the engine starts with (default: the demo model, created if missing)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port of the API; 0 picks a free one (default: 8000)")
    parser.add_argument("--rollout-workers", type=int, default=1, help="number of rollout processes (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    return up(
        data_dir=arguments.data_dir,
        model=arguments.model,
        port=arguments.port,
        rollout_workers=arguments.rollout_workers,
    )


def up(*, data_dir: str | None, model: str | None, port: int, rollout_workers: int) -> int:
    """Returns the exit status: 0 after Ctrl-C or SIGTERM, 1 if the stack could not start."""
    root = Path(data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    try:
        with terminate_as_interrupt():
            model_dir = model_at(model, DataDir(root)) if model else DataDir(root).model("calculator-tiny")
            config = StackConfig(
                root,
                model_dir,
                port=port,
                rollout_workers=rollout_workers,
                engine_urls=load_settings().engine_urls,
            )
            check_place(config)
            if not config.engine_urls:
                _provide_model(model_dir, make=model is None)
            serve(config)
    except KeyboardInterrupt:
        print("stopped; nothing is left running", flush=True)
        return 0
    except (StackError, SettingsError) as error:
        print(f"gspo up: {error}", file=sys.stderr)
        return 1


def serve(config: StackConfig) -> NoReturn:
    """Start the stack and look after it until interrupted. Raises StackError if it cannot start."""
    stack = Stack(config)
    names = ", ".join(process.name for process in stack.processes())
    given = f"; engines of GSPO_ENGINE_URLS: {', '.join(config.engine_urls)}" if config.engine_urls else ""
    print(f"starting {names} ...{given}", flush=True)
    logs = LogView(stack.log_dir)
    with stack:
        print(greeting(stack, config.model_dir), flush=True)
        look_after(stack, logs)


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
    given = f"{stack.engine_url}   (from GSPO_ENGINE_URLS; none is started here)"
    return (
        f"viewer  {stack.api_url}/ui\n"
        f"API     {stack.api_url}   (described at {stack.api_url}/docs)\n"
        f"gateway {stack.gateway_url}   (for agents that play episodes)\n"
        f"engine  {given if stack.config.engine_urls else own}\n"
        f"logs    {stack.log_dir}   (all of them follow here)\n\n"
        f"submit a job with: {typed_gspo()} submit FILE{flag}\n"
        f"Ctrl-C stops everything; what is in {stack.config.data_dir} stays, and the next start continues from it.\n"
    )
