"""``python -m services.trainer``: claims jobs and starts one process per attempt.

Under torchrun the first rank is the trainer; the others hold parts of the learner and follow it (``ranks``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from functools import partial

from services.process.children import die_with_launcher
from services.process.lifecycle import run_until_signalled
from services.process.settings import SettingsError, load_settings
from services.process.telemetry import configure_logging, get_logger, tell_unread_settings
from services.trainer.attempt_process import AttemptProcesses, NotStarted, Start, start_python
from services.trainer.serving import check_settings, serve


async def train(start: Start, stop: asyncio.Event) -> None:
    settings = load_settings()
    configure_logging("trainer", level=settings.log_level, log_format=settings.log_format)
    tell_unread_settings()
    check_settings(settings)
    async with AttemptProcesses(start) as attempts:
        capabilities = await attempts.capabilities(stop)
        if capabilities is not None:
            await serve(settings, stop, attempts, capabilities | {"num_ranks": 1})


def run(start: Start = start_python) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.trainer", description="Train jobs, one at a time.")
    parser.add_argument("--grace-s", type=float, default=30.0, help="seconds to finish a step after SIGTERM")
    grace_s = parser.parse_args().grace_s
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # set by torchrun
        die_with_launcher()
        from services.trainer import torchrun  # imports torch

        return torchrun.run(grace_s)
    try:
        return run_until_signalled(partial(train, start), grace_s=grace_s, computes=True)
    except SettingsError as error:
        print(f"services.trainer: {error}", file=sys.stderr)
        return 2
    except NotStarted as error:
        get_logger().error("the trainer exits", message=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(run())
