"""The numbers as text: for the terminal, and the page ``results/structure.md`` with its columns before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from benchmarks.structure.changes import Changes
from benchmarks.structure.code import LONG_FUNCTION
from benchmarks.structure.measure import Structure

RESULTS = Path(__file__).parents[1] / "results"
LOOSE = ("Any", "object", "dict[str, JSON]")


class Kept(TypedDict):
    """One column of the page."""

    revision: str
    date: str
    rows: dict[str, str]


def rows(structure: Structure) -> dict[str, str]:
    """What is measured, and its value, in the order of the page."""
    shown = {
        "modules": f"{structure.num_modules}",
        "rooms": f"{structure.num_rooms}",
        "of these, files of `services` without a room": f"{structure.num_loose_files}",
        "floors": f"{structure.num_floors}",
        "arrows between rooms": f"{structure.num_arrows}",
        "cycles between rooms (rooms in them)": _cycles(structure.room_cycles),
        "cycles between folders (folders in them)": _cycles(structure.folder_cycles),
        "cycles between modules (modules in them)": _cycles(structure.module_cycles),
        "the same, with imports inside functions": _cycles(structure.lazy_cycles),
    }
    for process, number in structure.imported.items():
        shown[f"own modules that `{process}` loads at its start"] = f"{number}"
    shown |= {
        "lines of the product": f"{structure.num_lines:,}",
        "lines of tests for one of the product": f"{structure.tests_per_line:.2f}",
        "lines of tests, benchmarks and examples": f"{structure.num_lines_beside:,}",
        "files that play episodes": f"{structure.num_wing_files}",
        "their lines": f"{structure.num_wing_lines:,}",
        "names of classes with several meanings": f"{structure.num_ambiguous_classes}",
        "lines of a function: 95th percentile": f"{structure.function_p95}",
        "lines of a function: longest": f"{structure.function_max}",
        f"functions above {LONG_FUNCTION} lines": f"{structure.num_long_functions}",
        "lines of the longest file": f"{structure.file_max}",
    }
    for kind in LOOSE:
        shown[f"`{kind}` as an annotation, per thousand lines"] = f"{structure.loose_per_kline(kind):.1f}"
    shown["all three together, per thousand lines"] = f"{structure.loose_per_kline(*LOOSE):.1f}"
    shown["names that stand for one of them, per thousand lines"] = f"{structure.loose_per_kline('aliases'):.1f}"
    return shown


def change_rows(changes: Changes) -> dict[str, str]:
    return {
        "stayed: unchanged, same path": f"{changes.stayed:,}",
        "moved: unchanged, another path": f"{changes.moved:,}",
        "merged: taken from one file, found again in another place": f"{changes.merged:,}",
        "left the product, unchanged (tests, examples)": f"{changes.left:,}",
        "came into the product, unchanged": f"{changes.arrived:,}",
        "import statements removed": f"{changes.imports_removed:,}",
        "import statements added": f"{changes.imports_added:,}",
        "deleted": f"{changes.deleted:,}",
        "written": f"{changes.written:,}",
    }


def as_text(shown: dict[str, str]) -> str:
    width = max(map(len, shown))
    return "\n".join(f"{label.replace('`', ''):{width}}  {value:>8}" for label, value in shown.items())


def keep(column: str, kept: Kept, folder: Path = RESULTS) -> None:
    """Replaces one column (``before`` or ``after``) and writes the page again."""
    path = folder / "structure.json"
    columns: dict[str, Kept] = json.loads(path.read_text()) if path.exists() else {}
    columns[column] = kept
    path.write_text(json.dumps(columns, indent=1) + "\n")
    (folder / "structure.md").write_text(page(columns))


def page(columns: dict[str, Kept]) -> str:
    before, after = columns.get("before"), columns.get("after")
    head = [_heading("before", before), _heading("after", after)]
    labels = dict.fromkeys(label for kept in (before, after) if kept for label in kept["rows"])
    table = [["measured", *head], ["---", "---:", "---:"]]
    table += [[label, _cell(before, label), _cell(after, label)] for label in labels]
    return _INTRODUCTION + "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"


def _heading(column: str, kept: Kept | None) -> str:
    return f"{column}: {kept['revision']}, {kept['date']}" if kept else column


def _cell(kept: Kept | None, label: str) -> str:
    return kept["rows"].get(label, "") if kept else ""


def _cycles(found: list[list[str]]) -> str:
    return f"{len(found)} ({', '.join(str(len(one)) for one in found)})" if found else "0"


_INTRODUCTION = """# How the code is divided

`python -m benchmarks.structure` measures a checkout from its text; `--at REVISION` measures another revision, `--since
REVISION` says where the lines went since then, `--keep after` writes the column here.

- A **room** is what has walls: `gspo_core`, `environments`, each folder of `services`. A file that lies in `services`
  itself is a room of its own. An **arrow** is one room that imports another, wherever and however often it does.
- **Floors** are the layers of that graph with its cycles condensed: a room stands one floor above the highest that it
  imports. Cycles hide floors, so read both rows together.
- What a process **loads at its start** follows the imports at the top of modules, packages included. Those for type
  checking count only where a module loads them on first use (`gspo_core.spec`). The number is that of `sys.modules`.
- **Lines** are those of Python files below `gspo_core`, `environments` and `services`, with comments and blank lines.
- **Files that play episodes** are those of `services/episodes`, `workers`, `rollout` and `gateway`.
- **Names of classes** are the public ones, but not those of `gspo_core/api_answers.py`, which is generated.
- **Annotations** are those of parameters, results and variables.
- A **function**'s lines go from its `def` to its end.

"""
