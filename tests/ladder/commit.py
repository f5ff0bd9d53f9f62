"""Which tree plays the rows: its commit, with a mark where the tree is not what was committed.

Rule: the pages that a run itself writes make no other tree; a run that was interrupted goes on after it has written.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

WRITTEN = ("benchmarks/results/ladder.json", "benchmarks/results/ladder.md")
UNKNOWN = "unknown"


def commit_of(root: Path, written: Collection[str] = WRITTEN) -> str:
    """``written``: the pages."""
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in written))
    return (f"{commit}-dirty" if changed else commit) or UNKNOWN


def _git(root: Path, *arguments: str) -> str:
    """Empty where this is no checkout."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
