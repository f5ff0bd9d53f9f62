"""docs/commands.md: what commands print, which a test keeps, and the help of each, which is written here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from gspo_core.cli import _parser
from gspo_core.cli.command import CommandParser

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
TITLE = "\n## Every command's help\n"
WIDTH = "100"


def written(page: str) -> str:
    head, title, _ = page.partition(TITLE)
    if not title:
        raise ValueError(f"{PAGE.name} has no heading {TITLE.strip()!r}")
    with mock.patch.dict(os.environ, {"COLUMNS": WIDTH}):
        return head + TITLE + "".join(_sections(_parser()))


def _sections(parser: argparse.ArgumentParser) -> Iterator[str]:
    if isinstance(parser, CommandParser):
        parser.fill()
    yield f"\n### {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in dict.fromkeys(action.choices.values()):
                yield from _sections(command)
