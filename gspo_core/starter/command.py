"""``gspo starter world.py:World --to DIR``: a tiny model that can begin to learn in a world of one's own, on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from gspo_core.cli.command import CommandError
from gspo_core.cli.env import CallersPath, config_of
from gspo_core.env import EnvironmentFailed, InvalidEnvironment, load_environment
from gspo_core.starter.making import JOB_FILE, CannotStart, make_starter


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Play a world with calls at random (and with its oracle's, where it has one), teach a tiny model to act so, "
        "and write a job that trains it from there. It takes a minute or two on a CPU. The world runs in this process."
    )
    parser.add_argument("ref", help="package.module:Class or path/to/file.py:Class")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder for the model and its job")
    parser.add_argument("--config", metavar="JSON", help="keyword arguments of the class")
    parser.add_argument("--seed", type=int, default=0, help="of what is played, and of the model's random start")


def _say(text: str) -> None:
    print(text, flush=True)


def run(arguments: argparse.Namespace) -> int:
    config = config_of(arguments.config)
    try:
        with CallersPath():
            environment = load_environment(arguments.ref, config)
        make_starter(environment, arguments.ref, config, arguments.to, seed=arguments.seed, say=_say)
    except (InvalidEnvironment, CannotStart) as error:
        raise CommandError(str(error)) from error
    except EnvironmentFailed as failure:
        raise CommandError(f"the environment failed in {failure.phase}: {failure.reason}") from failure
    print(f"\n{arguments.to} is ready. In one terminal   gspo up --model {arguments.to}")
    print(f"and in another          gspo submit {arguments.to / JOB_FILE} --watch")
    return 0
