"""Which rows there are, what runs at once, and what is found wrong with a job that says it succeeded."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.ladder.axes import EXACT, PLAIN, PROMPTS, TOOLS, Nature, Row, all_maxima, is_possible, rows_of
from tests.ladder.job import Result, judge
from tests.ladder.run import batches

NATURES = {
    PLAIN: Nature(0, dict(zip(TOOLS, (9, 180, 350, 1_100), strict=True))),
    "wordy": Nature(2, {5: 600, 20: 1_400}),
}
ROW = Row(2_000, 0, 3, 5, "wordy", 1, "auto", "full")


def test_all_exact_prompts_and_all_maxima_are_among_the_rows() -> None:
    rows, _ = rows_of(NATURES, seed=0)
    assert {row.prompt for row in rows if row.exact} == set(EXACT)
    assert Row(30_000, 20_000, 30, 20, "wordy", 2, "template", "full") in rows
    assert all(is_possible(row, NATURES) for row in rows if not row.exact)
    assert len({row.name for row in rows}) == len(rows)


def test_what_cannot_be_is_told() -> None:
    _, covering = rows_of(NATURES, seed=0)
    assert (("prompt", 20), ("world", "wordy")) in covering.impossible
    assert (("observation", 20_000), ("turns", 1)) in covering.impossible
    assert (("tools", 1), ("world", "wordy")) in covering.impossible
    assert not [pair for pair in covering.impossible if ("prompt", max(PROMPTS)) in pair]


def test_rows_for_two_jobs_run_in_pairs_and_the_largest_beside_itself() -> None:
    rows, _ = rows_of(NATURES, seed=0)
    found = list(batches(rows, NATURES))
    assert {row for batch in found for row in batch} == set(rows)
    assert all(len(batch) == batch[0].jobs for batch in found)
    assert [all_maxima(NATURES)] * 2 in found


def well() -> Result:
    return Result(
        asdict(ROW),
        ROW.name,
        seconds=1.0,
        status="succeeded",
        prompt_seen=(1_990, 2_010),
        episode_tokens=2_100,
        turns_seen=3,
    )


def test_a_job_that_did_what_its_row_asks_has_no_problems() -> None:
    assert judge(ROW, well(), num_steps=2, num_untrue=0) == []


@pytest.mark.parametrize(
    ("row", "result", "num_steps", "num_untrue", "problem"),
    [
        (ROW, well(), 1, 0, "1 steps"),
        (ROW, well(), 2, 3, "3 recorded log-probs"),
        (ROW, replace(well(), turns_seen=2), 2, 0, "2 turns, not 3"),
        (ROW, replace(well(), prompt_seen=(600, 2_000)), 2, 0, "prompts of 600 to 2000"),
        (replace(ROW, prompt=1_991, exact=True), well(), 2, 0, "not 1991"),
        (replace(ROW, observation=20_000), well(), 2, 0, "not read whole"),
    ],
)
def test_what_is_wrong_is_said(row: Row, result: Result, num_steps: int, num_untrue: int, problem: str) -> None:
    (said,) = judge(row, result, num_steps, num_untrue)
    assert problem in said
