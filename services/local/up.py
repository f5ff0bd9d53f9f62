"""``gspo up``: the whole stack until Ctrl-C, with the addresses that a person needs and the logs of all as one.

A process that dies is started again; a stack that is started again in the same folder goes on with its jobs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from services.data_dir import DataDir
from services.local.demo_model import NotADemoModel, make_demo_model
from services.local.log_view import LogView
from services.local.stack import Stack, StackConfig, StackError, check_place, terminate_as_interrupt
from services.local.supervisor import Supervisor

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

CHECK_S = 0.5


def up(*, data_dir: str | None, model: str | None, port: int, rollout_workers: int) -> int:
    """Returns the exit status: 0 after Ctrl-C or SIGTERM, 1 when the stack could not start."""
    root = Path(data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    model_dir = Path(model).resolve() if model else DataDir(root).model("calculator-tiny")
    config = StackConfig(root, model_dir, port=port, rollout_workers=rollout_workers)
    try:
        with terminate_as_interrupt():
            check_place(config)
            if model is None:
                make_demo_model(model_dir)
            elif not (model_dir / "config.json").exists():
                raise StackError(f"{model_dir} holds no model: a folder with config.json and *.safetensors is needed")
            print("starting Redis, engine, API, trainer and rollout workers ...", flush=True)
            logs = LogView(DataDir(root).logs)
            with Stack(config) as stack:
                print(greeting(stack, model_dir), flush=True)
                look_after(stack, logs)
    except KeyboardInterrupt:
        print("stopped; nothing is left running", flush=True)
        return 0
    except (StackError, NotADemoModel) as error:
        print(f"gspo up: {error}", file=sys.stderr)
        return 1


def look_after(stack: Stack, logs: LogView) -> NoReturn:
    """Show what the processes log and start again what ends, until an interrupt."""
    from rich.text import Text

    console = _console()
    supervisor = Supervisor(stack, lambda line: console.print(Text(line, style="bold yellow"), soft_wrap=True))
    while True:
        for line in logs.news():
            show(console, line)
        supervisor.look()
        time.sleep(CHECK_S)


def show(console: Console, line: Text) -> None:
    """Cut to the width of a terminal; whole where somebody else reads."""
    if console.is_terminal:
        console.print(line, no_wrap=True, overflow="ellipsis")
    else:
        console.print(line, soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def typed_gspo() -> str:
    """The command as it can be typed here: `make` has no activated environment."""
    return "gspo" if shutil.which("gspo") else os.path.relpath(Path(sys.executable).with_name("gspo"))


def greeting(stack: Stack, model_dir: Path) -> str:
    flag = "" if stack.api_url.endswith(":8000") else f" --url {stack.api_url}"
    return (
        f"viewer  {stack.api_url}/ui\n"
        f"API     {stack.api_url}   (described at {stack.api_url}/docs)\n"
        f"engine  {stack.engine_url}\n"
        f"model   {model_dir}\n"
        f"logs    {stack.log_dir}   (all of them follow here)\n\n"
        f"submit a job with: {typed_gspo()} submit FILE{flag}\n"
        f"Ctrl-C stops everything; what is in {stack.config.data_dir} stays, and the next start goes on with it.\n"
    )
