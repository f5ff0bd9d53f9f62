"""The record of plays at length: what is written, what takes whose place, and what is not played again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.play.packages import PACKAGES
from tests.play.report import KEPT, PAGE, REBASED, ROOT, Record, Run, page
from tests.play.verdict import Tally

RUN = Run(PACKAGES["openai"], seed=7, episodes=200, is_long=False, commit="0123abcdef")
OTHERS: list[dict[str, Any]] = [
    {"seed": 8},
    {"episodes": 20},
    {"is_long": True},
    {"commit": "fedcba9876"},
    {"package": PACKAGES["anthropic"]},
]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    (tmp_path / KEPT).parent.mkdir(parents=True)
    return Record(tmp_path)


def row(run: Run, **changes: Any) -> dict[str, Any]:
    told = {"seconds": 1, "load": 0.5, "cores": 2, "python": "3.11.7", "versions": {"openai": "3.52.0"}}
    names = {"package": run.package.name, "seed": run.seed, "is_long": run.is_long, "commit": run.commit}
    return {**vars(Tally(episodes=run.episodes)), **told, **names, **changes}


def test_what_was_played_is_known_again(record: Record):
    assert record.row_of(RUN) is None
    record.add(RUN, row(RUN))
    assert record.row_of(RUN) is not None


@pytest.mark.parametrize("other", OTHERS)
def test_anything_else_is_played(record: Record, other: dict[str, Any]):
    record.add(RUN, row(RUN))
    assert record.row_of(replace(RUN, **other)) is None


def test_a_tree_that_was_not_committed_is_played_again(record: Record):
    run = replace(RUN, commit="0123abcdef-dirty")
    record.add(run, row(run))
    assert record.row_of(run) is None


def test_a_row_takes_the_place_of_an_older_one_of_its_seed(record: Record):
    record.add(RUN, row(RUN, faults=["a fault"]))
    newer, beside = replace(RUN, commit="fedcba9876"), replace(RUN, seed=8)
    record.add(newer, row(newer))
    record.add(beside, row(beside))
    found = [(one["seed"], one["commit"], one["faults"]) for one in record.rows()]
    assert found == [(7, "fedcba9876", []), (8, "0123abcdef", [])]


def test_the_page_has_a_line_for_each_row(record: Record, tmp_path: Path):
    record.add(RUN, row(RUN, turns=1234, branches={"resampled": 3, "sub_agent": 1005}, faults=["a fault"]))
    long = replace(RUN, is_long=True)
    record.add(long, row(long, shortest=240, longest=31000))
    lines = [line for line in (tmp_path / PAGE).read_text().splitlines() if line.startswith("| openai 3.52.0")]
    assert lines[0].startswith("| openai 3.52.0 | 7 | 0123abcdef | 200 | 1,234 | 0 | resampled 3, sub_agent 1,005 |")
    assert lines[0].endswith("| 1 |")
    assert "| 240 to 31,000 |" in lines[1]


def test_faults_are_told_below_the_tables_by_episode_and_first_line(record: Record, tmp_path: Path):
    task = {"number": 3, "ends": ("Calls (all):",)}
    lost = [f"episode {number} ({task}): its process has ended\nTraceback" for number in (3, 7)]
    record.add(RUN, row(RUN, faults=[*lost, f"episode 9 ({task}): branches {{'sub_agent': 1}}, and not `one`"]))
    told = (tmp_path / PAGE).read_text().partition("## Faults")[2].splitlines()
    assert told[4:] == [
        "- openai, seed 7, `0123abcdef`, episodes 3, 7: `its process has ended`",
        "- openai, seed 7, `0123abcdef`, episode 9: `branches {'sub_agent': 1}, and not 'one'`",
    ]
    record.add(RUN, row(RUN))
    assert "## Faults" not in (tmp_path / PAGE).read_text()


def test_commits_that_the_history_lost_are_named_where_rows_have_them(record: Record, tmp_path: Path):
    record.add(RUN, row(RUN))
    assert "rebased" not in (tmp_path / PAGE).read_text()
    old = replace(RUN, seed=8, commit=REBASED[1])
    record.add(old, row(old))
    assert f"not in the history any more: `{REBASED[1]}`.\n" in (tmp_path / PAGE).read_text()


def test_no_row_of_the_page_was_written_by_hand():
    assert (ROOT / PAGE).read_text() == page(Record().rows())
