"""What ``make demo`` makes of its own result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.local.demo import DemoResult, shortcomings
from services.local.provenance import Provenance

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
