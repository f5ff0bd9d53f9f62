"""docs/architecture.md is true: what its tables name exists, and its lists are those of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.structure.measure import room_graph
from benchmarks.structure.source import read_modules

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    """A section without those of its own level that follow."""
    level = re.search(rf"^(#+) {re.escape(title)}$", PAGE, re.MULTILINE)
    assert level, f"the page has no section {title}"
    rest = PAGE[level.end() :]
    end = re.search(rf"^#{{1,{len(level[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    """Each table as its rows, by the names of its columns."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        yield [dict(zip(head, row, strict=True)) for row in rows]


ROWS = [row for table in tables(PAGE) for row in table if "file" in row]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['file']}:{row.get('name', '')}")
def test_a_file_exists_and_holds_what_is_named(row: dict[str, str]) -> None:
    path = ROOT / row["file"].strip("`")
    assert path.is_file()
    if name := row.get("name", "").strip("`"):
        assert re.search(defines(name), path.read_text(), re.MULTILINE), f"{path} defines no {name}"


def defines(name: str) -> str:
    name = re.escape(name)
    python = rf"^\s*(?:async )?(?:def|class) {name}\b|^{name}\b.*="
    return rf"{python}|function {name}\b|const {name}\b|id=\"{name}\""


def test_tables_that_name_files_were_read() -> None:
    assert len(ROWS) > 60


def test_the_life_of_a_token_is_short() -> None:
    """Of the path that must never lose, repeat or relabel anything."""
    path, *_ = tables(section("The life of a token"))
    assert [int(row["#"]) for row in path] == list(range(1, len(path) + 1))
    assert len({row["file"] for row in path}) <= 25


def test_files_are_about_as_long_as_the_page_says() -> None:
    said = re.findall(r"\(((?:`[\w/.]+`(?:, )?)+); some (\d+) lines\)", PAGE)
    assert len(said) >= 4
    for files, number in said:
        num_lines = sum(len((ROOT / file).read_text().splitlines()) for file in re.findall(r"`(.*?)`", files))
        assert abs(num_lines - int(number)) <= int(number) / 10, files


def test_the_rooms_of_the_page_are_those_of_the_tree() -> None:
    rows = [row for table in tables(section("The rooms")) for row in table]
    named = [row["room"].strip("`").replace("/", ".") for row in rows]
    assert sorted(named) == sorted(room_graph(read_modules(ROOT)))


def test_the_losses_of_the_page_are_those_of_the_code() -> None:
    from gspo_core.objective.losses import LOSSES
    from gspo_core.objective_config import Loss

    (listed,) = re.findall(r"The losses today: (.*)\.", section("A loss"))
    assert set(re.findall(r"`(\w+)`", listed)) == set(LOSSES) == set(get_args(Loss))


def test_a_chat_format_is_named_alike_where_it_is_chosen_and_where_a_job_asks_for_it() -> None:
    from gspo_core.chat.selection import Calls, Format
    from gspo_core.job_spec import ChatSpec

    fields = ChatSpec.model_fields
    assert get_args(fields["format"].annotation) == get_args(Format)
    assert get_args(fields["calls"].annotation) == get_args(Calls)


def test_an_alarm_has_advice_and_a_row() -> None:
    from gspo_core.objective import AlarmKind

    (file,) = {row["file"].strip("`") for row in ROWS if row.get("name") == "`RunAlarm`"}
    alarms = import_module(file.removesuffix(".py").replace("/", "."))
    assert set(alarms.ADVICE) == {*AlarmKind, *alarms.RunAlarm}
    explained = (ROOT / "docs" / "control.md").read_text()
    assert [kind for kind in alarms.RunAlarm if f"`{kind}`" not in explained] == []


def test_a_page_of_the_viewer_is_in_the_list_of_its_shell() -> None:
    folder = ROOT / "services" / "api" / "ui" / "js"
    imported = re.findall(r'from "\./pages/(\w+\.js)"', (folder / "main.js").read_text())
    assert sorted(imported) == sorted(path.name for path in (folder / "pages").glob("*.js"))
