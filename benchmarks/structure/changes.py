"""Where the lines of the product went between two revisions: stayed, moved, merged, left the product, rewritten.

Files are paired by git's rename detection (half of a file in common). Within a pair git says which lines are
unchanged. A line that git calls removed is looked for among the lines that it calls added anywhere: found, it was
merged into another place. Lines shorter than ``MIN_LENGTH`` stand everywhere and prove nothing, so they are never
merged; import statements are counted apart, since a move changes them all.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.structure.source import PRODUCT

MIN_LENGTH = 12
_IMPORT = re.compile(r"\s*(from [\w.]+ import |import [\w.]+)")


@dataclass
class Changes:
    stayed: int = 0
    """Unchanged, in a file of the same path."""
    moved: int = 0
    """Unchanged, in a file with another path within the product."""
    left: int = 0
    """Unchanged, in a file that is now outside of the product: apparatus of tests, examples."""
    arrived: int = 0
    """Unchanged, in a file that came into the product from outside."""
    merged: int = 0
    """Removed from one file, found again in another place."""
    imports_removed: int = 0
    imports_added: int = 0
    deleted: int = 0
    written: int = 0


def changes_since(root: Path, revision: str, until: str | None = None) -> Changes:
    """From ``revision`` to ``until``, by default what is checked out (files that git does not know are not seen)."""
    revisions = [revision] if until is None else [revision, until]
    counted = Changes()
    removed: Counter[str] = Counter()
    added: Counter[str] = Counter()
    lines_of_old = _lines_at(root, revision)
    seen_old = set()
    for old, new, minus, plus in _file_diffs(root, revisions):
        was, is_ = _is_product(old), _is_product(new)
        seen_old.add(old)
        unchanged = lines_of_old.get(old, 0) - len(minus)
        if was and is_ and old == new:
            counted.stayed += unchanged
        elif was and is_:
            counted.moved += unchanged
        elif was and new:
            counted.left += unchanged
        elif is_ and old:
            counted.arrived += unchanged
        removed.update(minus if was else [])
        added.update(plus if is_ else [])
    counted.stayed += sum(lines for path, lines in lines_of_old.items() if _is_product(path) and path not in seen_old)
    _count_unpaired(counted, removed, added)
    return counted


def _count_unpaired(counted: Changes, removed: Counter[str], added: Counter[str]) -> None:
    for line, times in removed.items():
        again = min(times, added[line]) if len(line.strip()) >= MIN_LENGTH else 0
        if _IMPORT.match(line):
            counted.imports_removed += times
        else:
            counted.merged += again
            counted.deleted += times - again
            added[line] -= again
    for line, times in added.items():
        if _IMPORT.match(line):
            counted.imports_added += times
        else:
            counted.written += times


def _file_diffs(root: Path, revisions: list[str]) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Old path, new path (empty where there is none), lines removed, lines added; of Python files that differ."""
    text = _git(root, "diff", "-M50%", "-l0", "-U0", "--no-color", "--no-ext-diff", *revisions, "--", "*.py")
    for part in re.split(r"^diff --git ", text, flags=re.MULTILINE)[1:]:
        header, *hunks = re.split(r"^@@ .*\n", part, flags=re.MULTILINE)
        changed = [line for hunk in hunks for line in hunk.splitlines()]
        minus = [line[1:] for line in changed if line.startswith("-")]
        plus = [line[1:] for line in changed if line.startswith("+")]
        yield *_paths(header), minus, plus


def _paths(header: str) -> tuple[str, str]:
    names = re.match(r"a/(.*) b/(.*)\n", header)
    assert names, header
    old, new = names.groups()
    return "" if "\nnew file mode" in header else old, "" if "\ndeleted file mode" in header else new


def _lines_at(root: Path, revision: str) -> dict[str, int]:
    """Lines of each Python file of the revision; ``git grep`` counts the lines that match the empty pattern."""
    counted = _git(root, "grep", "-c", "-I", "", revision, "--", "*.py")
    found = (line.removeprefix(f"{revision}:").rpartition(":") for line in counted.splitlines())
    return {path: int(lines) for path, _, lines in found}


def _is_product(path: str) -> bool:
    return path.split("/")[0] in PRODUCT


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


def as_dict(counted: Changes) -> dict[str, int]:
    return {field.name: getattr(counted, field.name) for field in fields(counted)}
