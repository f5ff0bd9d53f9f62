"""``python -m benchmarks.structure``: measure a tree, say where its lines went, keep the numbers, draw the rooms."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.structure.changes import as_dict, changes_since
from benchmarks.structure.drawing import draw
from benchmarks.structure.measure import measure
from benchmarks.structure.report import Kept, as_text, change_rows, keep, rows
from benchmarks.structure.source import read_modules


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structure", description=__doc__)
    parser.add_argument("--tree", default=".", help="the checkout to measure")
    parser.add_argument("--at", metavar="REVISION", help="measure this revision of it instead of its files")
    parser.add_argument("--since", metavar="REVISION", help="also say where the lines went since then")
    parser.add_argument("--json", action="store_true", help="everything as JSON, cycles with their members")
    parser.add_argument("--keep", choices=["before", "after"], help="write this column of results/structure.md")
    parser.add_argument("--draw", metavar="FILE", help="write the rooms as a picture (SVG)")
    return parser


@contextmanager
def unpacked(tree: Path, revision: str | None) -> Iterator[Path]:
    """The folder to measure: the tree, or a copy of one of its revisions."""
    if revision is None:
        yield tree
        return
    packed = subprocess.run(["git", "archive", revision], cwd=tree, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def describe(tree: Path, revision: str | None) -> tuple[str, str]:
    """Commit and date, with a plus where the files are not those of the commit."""
    shown = subprocess.run(
        ["git", "show", "-s", "--format=%h %cs", revision or "HEAD"],
        cwd=tree,
        check=True,
        capture_output=True,
        text=True,
    )
    commit, date = shown.stdout.split()
    dirty = revision is None and subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=tree, check=False).returncode
    return commit + ("+" if dirty else ""), date


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    tree = Path(options.tree)
    with unpacked(tree, options.at) as folder:
        structure = measure(folder)
        if options.draw:
            Path(options.draw).write_text(draw(read_modules(folder)))
    changes = changes_since(tree, options.since, options.at) if options.since else None
    shown = rows(structure) | (change_rows(changes) if changes else {})
    if options.json:
        print(json.dumps(structure.to_dict() | ({"changes": as_dict(changes)} if changes else {}), indent=1))
    else:
        print(as_text(shown))
    if options.keep:
        revision, date = describe(tree, options.at)
        keep(options.keep, Kept(revision=revision, date=date, rows=shown))


if __name__ == "__main__":
    main()
