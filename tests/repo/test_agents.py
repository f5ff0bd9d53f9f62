"""The commands of AGENTS.md work; nothing in the checkout is changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.repo.commands import judge
from tests.repo.pages import ROOT, blocks, simple_commands, without_comments

MAX_LINES = 80
BIN = Path(sys.executable).parent
COMMANDS = [
    words for one in blocks() if one.page == "AGENTS.md" for words in simple_commands(without_comments(one.typed))
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_commands_of_the_page_work(words: list[str]) -> None:
    """What `make test` runs anyway (`pytest`, `mypy`, `ruff`, `lint-imports`) is not run: its paths are looked at."""
    program = words[0].removeprefix(".venv/bin/")
    assert [word for word in words[1:] if "/" in word and not (ROOT / word).exists()] == []
    if program == "make":
        judge(words, whole=True)
    else:
        assert (BIN / program).exists()


def test_there_are_commands_and_the_page_stays_short() -> None:
    assert len(COMMANDS) >= 10
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= MAX_LINES
