"""The parts that commands share: a parser, and the error that ends a command. It knows no command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence


class CommandError(Exception):
    """Ends the command with status 1; the message is for a person."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose options may wait until its command is typed, so that no other command pays for their imports."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse a misspelt value, and suggest the one that may have been meant."""
        known = list(map(str, action.choices)) if action.choices is not None else []
        if not known or value in known:
            return
        what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else f": there are {', '.join(known)}"
        raise argparse.ArgumentError(action, f"there is no {what} {str(value)!r}{hint}")

    _fill: Callable[[argparse.ArgumentParser], None] | None = None

    def defer(self, fill: Callable[[argparse.ArgumentParser], None]) -> None:
        """``fill`` adds the options; it is called once, and may raise CommandError."""
        self._fill = fill

    def fill(self) -> None:
        """Add what waits."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.fill()
        return super().parse_known_args(args, namespace)
