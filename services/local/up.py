"""``gspo up``: the whole stack until Ctrl-C, with the addresses that a person needs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from services.local.demo_model import NotADemoModel, make_demo_model
from services.local.stack import Stack, StackConfig, StackError, check_place, terminate_as_interrupt

CHECK_S = 0.5


def up(*, data_dir: str | None, model: str | None, port: int, rollout_workers: int) -> int:
    """Returns the exit status: 0 after Ctrl-C or SIGTERM, 1 when the stack could not start or a process died."""
    root = Path(data_dir or os.environ.get("GSPO_DATA_DIR", ".gspo")).resolve()
    model_dir = Path(model).resolve() if model else root / "models" / "calculator-tiny"
    config = StackConfig(root, model_dir, port=port, rollout_workers=rollout_workers)
    try:
        with terminate_as_interrupt():
            check_place(config)
            if model is None:
                make_demo_model(model_dir)
            elif not (model_dir / "config.json").exists():
                raise StackError(f"{model_dir} holds no model: a folder with config.json and *.safetensors is needed")
            print("starting Redis, engine, API, trainer and rollout workers ...", flush=True)
            with Stack(config) as stack:
                print(greeting(stack, model_dir), flush=True)
                while True:
                    stack.check()
                    time.sleep(CHECK_S)
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 0
    except (StackError, NotADemoModel) as error:
        print(f"gspo up: {error}", file=sys.stderr)
        return 1


def greeting(stack: Stack, model_dir: Path) -> str:
    flag = "" if stack.api_url.endswith(":8000") else f" --url {stack.api_url}"
    return (
        f"viewer  {stack.api_url}/ui\n"
        f"API     {stack.api_url}   (described at {stack.api_url}/docs)\n"
        f"engine  {stack.engine_url}\n"
        f"model   {model_dir}\n"
        f"logs    {stack.log_dir}\n\n"
        f"submit a job with: gspo submit FILE{flag}\n"
        f"Ctrl-C stops everything; what is in {stack.config.data_dir} stays."
    )
