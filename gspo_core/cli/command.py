"""The parts that commands share: a parser, and the error that ends a command. It knows no command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


class CommandError(Exception):
    """Ends the command with status 1; the message is for a person."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose options may wait until its command is typed, so that no other command pays for their imports."""

    _fill: Callable[[argparse.ArgumentParser], None] | None = None

    def defer(self, fill: Callable[[argparse.ArgumentParser], None]) -> None:
        """``fill`` adds the options; it is called once, and may raise CommandError."""
        self._fill = fill

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        return super().parse_known_args(args, namespace)
