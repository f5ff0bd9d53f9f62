"""``gspo launch PLACE``: runs the stack elsewhere than as children of one command.

Each module here is a launcher, a place named after it. A new one is one new file: it is found, and nothing names it.
``services.launch.topology`` tells it what to start.
"""

from __future__ import annotations

import argparse
import pkgutil
from importlib import import_module
from typing import Protocol, cast


class Launcher(Protocol):
    """The interface of a module here."""

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
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: cast(Launcher, import_module(f"{__name__}.{name}")) for name in names}
