"""Tests that a page sets apart are not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gate import flakes
from tests.gate.never_excused import is_never_excused
from tests.quarantine import PAGE, ROW, Row, mark, rows

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_quarantine_is_read_and_names_a_test() -> None:
    page = PAGE.read_text()
    written = [line for line in page.partition("|---|")[2].splitlines()[1:] if line.startswith("|")]
    assert [line for line in written if not ROW.fullmatch(line)] == []
    for row in rows(page):
        file, *_, name = row.test.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), row.test
        assert not is_never_excused(row.test), f"{row.test} is never set apart"


def test_every_line_of_the_flakes_is_read_and_names_a_test_that_may_be_excused() -> None:
    for test in flakes.known(flakes.LIST.read_text()):
        file, *_, name = test.partition("[")[0].split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
        assert not is_never_excused(test), f"{test} is never excused"


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
