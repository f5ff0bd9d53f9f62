"""``gspo launch PLACE``: runs the stack elsewhere than as children of one command.

Duty: find the launchers, one module each in ``launchers``, and offer each as a place. It names none of them.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from gspo_core.cli.command import CommandError
from services.launch import launchers


class Launcher(Protocol):
    """The interface of a module in ``launchers``."""

    HELP: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Returns the exit status. Raises CommandError."""
        ...


def add_options(parser: argparse.ArgumentParser) -> None:
    places = parser.add_subparsers(title="places", metavar="PLACE", required=True)
    for name, launcher in found().items():
        place = places.add_parser(name, help=launcher.HELP)
        launcher.add_options(place)
        place.set_defaults(run=launcher.run)


def run(arguments: argparse.Namespace) -> int:
    raise AssertionError("a place is required, and each sets its own run")


def found() -> dict[str, Launcher]:
    """Every launcher by the name of its place."""
    names = sorted(module.name for module in pkgutil.iter_modules(launchers.__path__))
    return {name: cast(Launcher, import_module(f"{launchers.__name__}.{name}")) for name in names}


def write(text: str, output: str | None) -> bool:
    """Write ``text`` to the file ``output`` or the terminal. Returns whether it was a file; raises CommandError."""
    if output is None:
        sys.stdout.write(text)
        return False
    path = Path(output)
    try:
        path.write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    return True
