"""The commands of AGENTS.md work. Of tests only the paths and options are tried; nothing in the checkout is changed."""

from __future__ import annotations

import re
import subprocess
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
# Added to a program, so that it only looks; where nothing serves for that, what is run instead and by which test.
ONLY_LOOKING = {
    "pytest": ("--collect-only", "-q", "--ignore-glob=*/test_*.py"),  # to import them all takes a minute
    "ruff": ("--no-cache",),
    "mypy": ("--version",),  # the whole of it takes a minute: `make check`
    "lint-imports": ("--help",),  # tests/repo/test_packaging.py runs it
}


PYTEST = ".venv/bin/pytest"


def to_try() -> list[list[str]]:
    """The commands, those of pytest as one with the options and paths of all: each would import the same."""
    of_pytest = [word for words in COMMANDS if words[0] == PYTEST for word in words[1:]]
    return [[PYTEST, *of_pytest], *(words for words in COMMANDS if words[0] != PYTEST)]


@pytest.mark.parametrize("words", to_try(), ids=" ".join)
def test_the_commands_of_the_page_work(words: list[str]) -> None:
    if words[0] == "make":
        return judge(words, whole=True)
    program = words[0].removeprefix(".venv/bin/")
    asked = [*words[1:], *ONLY_LOOKING[program]]
    if words[1:2] == ["format"]:
        asked.append("--check")
    done = subprocess.run([BIN / program, *asked], cwd=ROOT, capture_output=True, text=True, check=False)
    nothing_to_do = pytest.ExitCode.NO_TESTS_COLLECTED if program == "pytest" else 0
    assert done.returncode == nothing_to_do, done.stdout + done.stderr


def test_there_are_commands_and_the_page_stays_short() -> None:
    assert len(COMMANDS) >= 10
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= MAX_LINES


def test_limits_on_the_page_are_those_that_are_measured() -> None:
    from benchmarks.structure.code import LONG_FUNCTION

    assert re.findall(r"\((\d+) lines at most\)", (ROOT / "AGENTS.md").read_text()) == [str(LONG_FUNCTION)]
