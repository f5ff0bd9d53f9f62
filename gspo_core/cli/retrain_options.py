"""The options of ``gspo retrain``: a new job on what another has played."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from gspo_core.cli.command import CommandParser


def add_retrain(
    commands: argparse._SubParsersAction[CommandParser], add_server: Callable[[CommandParser], None]
) -> None:
    retrain = commands.add_parser("retrain", help="train a new job on the recorded episodes of another")
    retrain.add_argument("job")
    retrain.add_argument(
        "--first", type=int, metavar="STEP", help="from this step's batch on (default: the oldest kept)"
    )
    retrain.add_argument("--last", type=int, metavar="STEP", help="up to this step's batch (default: the newest)")
    retrain.add_argument("--rewards", metavar="FILE", help="other rewards, as gspo rescore --to writes them")
    retrain.add_argument("--traces", metavar="FILE", help="on conversations: a list of groups, reward by trace in each")
    retrain.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="with another setting")
    retrain.add_argument("--name", help="its label (default: the other's)")
    retrain.add_argument("--dry-run", action="store_true", help="say what it takes; create nothing")
    add_server(retrain)
    retrain.set_defaults(run=_retrain)


def _retrain(arguments: argparse.Namespace) -> int:
    from gspo_core.cli import jobs

    return jobs.retrain(
        arguments.url,
        arguments.job,
        arguments.set,
        first=arguments.first,
        last=arguments.last,
        rewards=arguments.rewards,
        traces=arguments.traces,
        name=arguments.name,
        dry_run=arguments.dry_run,
    )
