"""Sections of `benchmarks/results/k8s.md`: what one run of `make real-k8s` said, with commit, date and load.

A section is written when all of a run holds, and takes the place of the one before. The rest is written by hand.
"""

from __future__ import annotations

import re
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


def section(
    said: Sequence[Said], stages: str, at: str, changed: Sequence[str] = (), now: datetime | None = None
) -> str:
    """``stages``: lines of what was done before, for how long and at which load, parted by tabs; ``changed``: what the
    manifests say otherwise on this cluster."""
    day = (now or datetime.now(UTC)).strftime("%d %B %Y, %H:%M UTC")
    rows = [line.split("\t") for line in stages.splitlines()]
    lines = [
        HEADING,
        f"One command, ended {day}, commit {at}. Seconds count from the check's start; load is of the last minute.\n",
        "| seconds | load | what |",
        "|---|---|---|",
        *(f"| before | {load} | {what}: {took} |" for what, took, load in rows),
        *(f"| {one.after_s:.0f} | {one.load:.0f} | {' '.join(one.text.replace('|', '/').split())} |" for one in said),
        *(["\nChanged for this cluster, and for the test alone:\n"] if changed else ()),
        *(f"- {one}" for one in changed),
    ]
    return "\n".join(lines) + "\n"


def put_into(page: Path, new: str) -> None:
    """In the place of the section with the same heading, else at the end. Raises ValueError where there are two of it.

    A section goes on to the next ``## ``, so none may show one in a block.
    """
    heading = new.partition("\n")[0]
    before, *rest = f"\n{page.read_text().rstrip()}\n".split(f"\n{heading}\n")
    if len(rest) > 1:
        raise ValueError(f"{page.name} has {heading!r} {len(rest)} times")
    others = re.search(r"^## .*", rest[0], re.MULTILINE | re.DOTALL) if rest else None
    sections = (before.strip(), new.strip(), others[0].rstrip() if others else "")
    page.write_text("\n\n".join(one for one in sections if one) + "\n")
