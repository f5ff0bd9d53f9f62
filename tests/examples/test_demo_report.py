"""What ``make demo`` makes of its own result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.demo.provenance import Provenance
from examples.demo.report import CHART_HEIGHT, CHART_WIDTH, DemoResult, chart, shortcomings

TRUE = Provenance(num_tokens=200, num_equal=200, largest_difference=1e-6, num_versions=9)
LEARNED = DemoResult("job", "succeeded", 0, 50, [0.2, 0.7], [(0, 0.25), (50, 0.5)], 0.1, 1.8, TRUE, 60.0)


def test_a_run_that_learned_and_recorded_the_truth_has_none() -> None:
    assert shortcomings(LEARNED, None) == shortcomings(LEARNED, 25) == []


def test_a_single_log_prob_that_is_not_true_is_one() -> None:
    (found,) = shortcomings(replace(LEARNED, provenance=replace(TRUE, num_equal=199)), None)
    assert found.startswith("1 recorded log-probs")


@pytest.mark.parametrize("after", [0.49, float("nan")])
def test_so_is_too_small_a_gain(after: float) -> None:
    (found,) = shortcomings(replace(LEARNED, evaluations=[(0, 0.25), (50, after)]), 25)
    assert "25 were expected" in found


@pytest.mark.parametrize("num_steps", [1, 20, 50, 300])
def test_the_chart_rises_where_the_reward_does_and_is_narrower_than_a_terminal(num_steps: int) -> None:
    rewards = [step / num_steps for step in range(1, num_steps + 1)]
    *rows, axis, legend = chart(replace(LEARNED, rewards=rewards, evaluations=[(0, 0.0), (num_steps, 1.0)])).split("\n")
    assert len(rows) == CHART_HEIGHT
    assert max(map(len, [*rows, axis])) <= CHART_WIDTH + 10 < 100
    inside = [row.partition("|")[2] for row in rows]
    assert inside[0].endswith("o")
    assert inside[-1].startswith("o")
    bars = [sum(cell not in " o" for cell in row) for row in inside]
    assert bars == sorted(bars)
    assert f"{num_steps} steps" in legend


def test_an_evaluation_without_a_reward_has_no_place_in_the_chart() -> None:
    drawn = chart(replace(LEARNED, evaluations=[(0, 0.25), (2, float("nan"))]))
    assert sum(row.partition("|")[2].count("o") for row in drawn.split("\n")) == 1
