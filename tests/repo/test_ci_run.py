"""The last lines of `.ci/run` name what failed and how to repeat it; tests that a page sets apart are not run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.quarantine import PAGE, ROW, Row, mark, rows

ROOT = Path(__file__).parents[2]
SAID = """\
tests/core/test_a.py ..F
FAILED tests/core/test_a.py::test_one[a b] - AssertionError: 1 == 2
ERROR tests/core/test_b.py::test_two - ResourceWarning: left open
1 failed, 2 passed, 1 error
"""


def ci_run(tree: Path, **recipes: str) -> subprocess.CompletedProcess[str]:
    (tree / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tree / ".ci" / "run")
    (tree / "said").write_text(SAID)
    targets = {"setup": "true", "check": "true", "suite": "echo 4 passed", "demo": "echo learned"} | recipes
    (tree / "Makefile").write_text("".join(f"{name}:\n\t@{recipe}\n" for name, recipe in targets.items()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["bash", ".ci/run"], cwd=tree, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def last_part(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stdout.partition("==== ci ====\n")[2].splitlines()


def test_a_run_that_passes_says_each_part_and_its_time(tmp_path: Path) -> None:
    done = ci_run(tmp_path)
    assert done.returncode == 0
    *parts, verdict = last_part(done)
    assert [re.sub(r"\d+", "N", part) for part in parts] == [
        f"ci: {name} ok after N s" for name in ("setup", "checks", "tests", "demo")
    ]
    assert verdict.startswith("ci: all is well")


def test_failed_tests_are_the_last_lines_with_their_errors_and_the_commands_that_repeat_them(tmp_path: Path) -> None:
    done = ci_run(tmp_path, suite="cat said; exit 1", demo="touch demo-ran")
    assert done.returncode != 0
    assert not (tmp_path / "demo-ran").exists()
    tail = last_part(done)
    assert any(re.fullmatch(r"ci: tests FAILED \(status 2\) after \d+ s; again: make suite", line) for line in tail)
    assert "FAILED tests/core/test_a.py::test_one[a b] - AssertionError: 1 == 2" in tail
    assert "ERROR tests/core/test_b.py::test_two - ResourceWarning: left open" in tail
    assert "ci: again: .venv/bin/pytest 'tests/core/test_a.py::test_one[a b]'" in tail
    assert "ci: again: .venv/bin/pytest 'tests/core/test_b.py::test_two'" in tail


@pytest.mark.parametrize(("target", "part"), [("setup", "setup"), ("check", "checks"), ("demo", "demo")])
def test_another_part_that_fails_says_its_last_words(target: str, part: str, tmp_path: Path) -> None:
    done = ci_run(tmp_path, **{target: "echo a reason >&2; exit 3"})
    assert done.returncode != 0
    tail = last_part(done)
    assert any(line.startswith(f"ci: {part} FAILED (status 2)") for line in tail)
    assert "a reason" in tail


def test_every_row_of_the_quarantine_is_read_and_names_a_test() -> None:
    page = PAGE.read_text()
    written = [line for line in page.partition("|---|")[2].splitlines()[1:] if line.startswith("|")]
    assert [line for line in written if not ROW.fullmatch(line)] == []
    for row in rows(page):
        file, name, *_ = re.split(r"::|\[", row.test)
        assert f"def {name}(" in (ROOT / file).read_text(), row.test


class _Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.marks: list[str] = []

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks.append(marker.name)


def test_a_row_sets_a_test_apart_with_all_of_its_parameters() -> None:
    page = "| 2026-11-26 | `tests/a.py::test_one` | once |\n| 2026-11-26 | `tests/a.py::test_two[b-1]` | once |\n"
    names = ("tests/a.py::test_one[x]", "tests/a.py::test_one", "tests/a.py::test_two[b-1]", "tests/a.py::test_two[c]")
    items = [_Item(name) for name in names]
    mark(items, rows(page))  # type: ignore[arg-type]  # only what is used of an item
    assert [item.marks for item in items] == [["quarantined"]] * 3 + [[]]
    assert [type(row) for row in rows(page)] == [Row, Row]
