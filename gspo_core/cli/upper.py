"""Commands of the library's upper half, which needs torch: imported when they are typed, and named where torch is not.

Rule: like ``service``, it knows modules by name only, so that the command stays quick to start and light to install.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import cast

from gspo_core.cli.command import CommandError
from gspo_core.cli.service import Actions, CommandModule, ServiceCommand

COMMANDS = (
    ServiceCommand("audit", "check where weights come from, by digests", "gspo_core.replay.audit_command"),
    ServiceCommand("bundle", "pack what a replay needs into one file", "gspo_core.replay.bundle_command"),
    ServiceCommand("replay", "train logged steps of a job again, or otherwise", "gspo_core.replay.command"),
    ServiceCommand("rescore", "judge recorded episodes by another reward", "gspo_core.replay.rescore_command"),
    ServiceCommand("starter", "make a tiny model to begin with, for a world of yours", "gspo_core.starter.command"),
    ServiceCommand("tables", "write a job's past as Parquet files", "gspo_core.replay.tables_command"),
)


def add_upper_commands(actions: Actions) -> None:
    for command in COMMANDS:
        actions.add_parser(command.name, help=command.help).defer(_filler(command))


def _filler(command: ServiceCommand) -> Callable[[argparse.ArgumentParser], None]:
    def fill(parser: argparse.ArgumentParser) -> None:
        try:
            module = cast(CommandModule, import_module(command.module))
        except ModuleNotFoundError as error:
            raise CommandError(
                f"`gspo {command.name}` trains, but {error.name} is not installed here: install gspo[train]"
            ) from error
        parser.set_defaults(run=module.run)
        module.add_options(parser)

    return fill
