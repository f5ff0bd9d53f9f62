"""The last section of `benchmarks/results/k8s.md`: what one run of `make real-k8s` said, with commit, date and load.

It is written when all of a run holds, and takes the place of the one before. What stands above it is written by hand.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.e2e.compose_check import Said

HEADING = "## The last run of `make real-k8s`\n"


def commit(root: Path) -> str:
    """The commit of a working tree, and whether it is changed."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + (", with changes that are not committed" if changed else "")


def section(said: Sequence[Said], stages: str, at: str, now: datetime | None = None) -> str:
    """``stages``: lines of what was done before, for how long and at which load, parted by tabs."""
    day = (now or datetime.now(UTC)).strftime("%d %B %Y, %H:%M UTC")
    rows = [line.split("\t") for line in stages.splitlines()]
    lines = [
        HEADING,
        f"One command, ended {day}, commit {at}. Seconds count from the check's start; load is of the last minute.\n",
        "| seconds | load | what |",
        "|---|---|---|",
        *(f"| before | {load} | {what}: {took} |" for what, took, load in rows),
        *(f"| {one.after_s:.0f} | {one.load:.0f} | {one.text.replace('|', '/')} |" for one in said),
    ]
    return "\n".join(lines) + "\n"


def put_into(page: Path, new: str) -> None:
    before = page.read_text().partition(HEADING)[0].rstrip()
    page.write_text(f"{before}\n\n{new}")
