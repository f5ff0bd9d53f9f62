"""Intervals and comparisons of evaluations: against numbers computed by hand, and against what they promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_core.evaluation.comparison import difference, mcnemar, shares_interval, sign_flips
from gspo_core.evaluation.intervals import mean_interval, score, wilson_interval
from gspo_core.evaluation.quantiles import t_probability, t_quantile

NUM_REPEATS = 400
# 0.95 is promised; room for the lowest coverage of these methods in the ranges below, and for the luck of 400 repeats.
LEAST_COVERAGE = 0.89


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (9, 2.262157), (29, 2.045230), (100, 1.983972), (1e6, 1.959966)],
)
def test_quantiles_of_t_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-6)
    assert t_quantile(0.025, freedom) == pytest.approx(-quantile, abs=1e-6)


@given(st.floats(0.001, 0.999), st.floats(1, 500))
def test_a_quantile_of_t_has_its_probability(probability: float, freedom: float) -> None:
    assert t_probability(t_quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-9)


def test_a_share_has_wilsons_interval() -> None:
    found = score([[1.0]] * 8 + [[0.0]] * 2)
    assert found is not None
    assert found.is_share
    assert (found.mean, found.num_tasks, found.num_episodes) == (0.8, 10, 10)
    assert (found.low, found.high) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    none = score([[0.0]] * 10)
    assert none is not None
    assert (none.low, none.high) == pytest.approx((0.0, 0.277533), abs=1e-6)


def test_a_mean_has_students_interval() -> None:
    """The mean is 3, the standard deviation 1.5811, the error 0.70711, and t with 4 degrees 2.776445."""
    found = score([[1.0], [2.0], [3.0], [4.0], [5.0]])
    assert found is not None
    assert found.method == "t"
    assert (found.mean, found.low, found.high) == pytest.approx((3, 1.036757, 4.963243), abs=1e-6)


def test_episodes_of_a_task_that_all_end_alike_are_worth_one() -> None:
    """Four tasks: Wilson's interval of 4 trials with t of 3 degrees, by hand."""
    found = score([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert found is not None
    assert (found.mean, found.num_tasks, found.num_episodes) == (0.5, 4, 8)
    assert (found.low, found.high) == pytest.approx((0.076658, 0.923342), abs=1e-6)


def test_each_task_weighs_the_same_and_one_without_a_reward_nothing() -> None:
    found = score([[1.0, 1.0, 1.0], [0.0], []])
    assert found is not None
    assert (found.mean, found.num_tasks, found.num_episodes) == (0.5, 2, 4)


def test_nothing_is_made_up() -> None:
    assert score([]) is None
    assert score([[], []]) is None
    single = score([[0.5]])
    assert single is not None
    assert (single.low, single.high) == (None, None)
    several = score([[1.0, 0.0, 1.0]])
    assert several is not None
    assert (several.low, several.high) == (None, None), "one task says nothing about others"


def test_the_exact_test_of_mcnemar() -> None:
    """2 (1 + 12 + 66) / 4096."""
    assert mcnemar(10, 2) == mcnemar(2, 10) == pytest.approx(158 / 4096)
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1
    assert 0 < mcnemar(2600, 2400) < 0.01


def test_the_interval_of_a_difference_of_paired_shares() -> None:
    """By hand: shares 11/102 and 3/102, error 0.0358515."""
    assert shares_interval(10, 2, 100, 0.95) == pytest.approx((0.008164, 0.148699), abs=1e-5)


def test_signs_are_flipped_in_all_ways() -> None:
    assert sign_flips([1.0, 1.0, 1.0]) == 2 / 8
    assert sign_flips([2.0, 1.0, 0.0]) == 2 / 4
    assert sign_flips([0.0, 0.0]) == 1
    assert sign_flips([1.0, -1.0]) == 1


def test_many_signs_are_drawn_and_agree_with_all_of_them() -> None:
    values = [0.5, 1.5, -0.25, 0.75, 1.0, -0.5, 2.0, 0.25, 1.25, -1.0, 0.1, 0.9, 0.3, -0.2]
    exact = sign_flips(values)
    drawn = sign_flips([*values, 1e-9])  # one more than are looked at one by one
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact / 20_000))
    assert drawn == sign_flips([*values, 1e-9])


def test_only_tasks_that_both_have_are_compared() -> None:
    found = difference({0: [1.0], 1: [1.0], 2: [0.0], 7: [1.0]}, {0: [0.0], 1: [1.0], 2: [1.0], 8: [0.0], 7: []})
    assert found is not None
    assert (found.method, found.num_tasks, found.num_better, found.num_worse, found.mean) == ("mcnemar", 3, 1, 1, 0)
    assert difference({0: [1.0]}, {1: [1.0]}) is None


def test_several_episodes_a_task_are_compared_by_their_means() -> None:
    """Differences 0.5, 0.5, 0: mean 1/3, error 1/6, t with 2 degrees 4.302653; two of four flips are as large."""
    found = difference({0: [1.0, 0.0], 1: [1.0, 1.0], 2: [0.0, 0.0]}, {0: [0.0, 0.0], 1: [0.0, 1.0], 2: [0.0, 0.0]})
    assert found is not None
    assert found.method == "sign_flips"
    assert (found.mean, found.low, found.high) == pytest.approx((1 / 3, -0.383776, 1.050442), abs=1e-6)
    assert found.p_value == 2 / 4


@settings(max_examples=15, deadline=None)
@given(st.floats(0.1, 0.9), st.integers(20, 300), st.integers(0, 2**32 - 1))
def test_wilsons_interval_holds_the_share(share: float, num: int, seed: int) -> None:
    counts = np.random.default_rng(seed).binomial(num, share, NUM_REPEATS)
    bounds = [wilson_interval(count / num, num, 1.959964) for count in counts]
    assert np.mean([low <= share <= high for low, high in bounds]) > LEAST_COVERAGE


@settings(max_examples=15, deadline=None)
@given(st.floats(0.2, 0.8), st.floats(0.3, 20), st.integers(2, 8), st.integers(20, 60), st.integers(0, 2**32 - 1))
def test_the_interval_of_tasks_with_several_episodes_holds_the_share(
    share: float, evenness: float, samples: int, tasks: int, seed: int
) -> None:
    """Tasks of different difficulty, from all or nothing (a small evenness) to all alike."""
    generator = np.random.default_rng(seed)

    def drawn() -> list[list[float]]:
        chances = generator.beta(share * evenness, (1 - share) * evenness, tasks)
        return [[float(one) for one in generator.random(samples) < chance] for chance in chances]

    assert coverage(drawn, share) > LEAST_COVERAGE


@settings(max_examples=10, deadline=None)
@given(st.integers(20, 100), st.integers(0, 2**32 - 1))
def test_students_interval_holds_the_mean(tasks: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    assert coverage(lambda: [[float(one)] for one in generator.beta(2, 3, tasks)], 0.4) > LEAST_COVERAGE


def coverage(drawn: Callable[[], list[list[float]]], truth: float) -> float:
    scores = [score(drawn()) for _ in range(NUM_REPEATS)]
    held = [one is not None and one.low is not None and one.low <= truth <= (one.high or 0.0) for one in scores]
    return float(np.mean(held))


@settings(max_examples=10, deadline=None)
@given(st.floats(0.1, 0.4), st.floats(0.05, 0.2), st.integers(40, 200), st.integers(0, 2**32 - 1))
def test_the_interval_of_a_paired_difference_holds_it_and_alike_policies_seldom_differ(
    better: float, worse: float, tasks: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    held, rejected = 0, 0
    for _ in range(NUM_REPEATS):
        kinds = generator.multinomial(tasks, (better, worse, 1 - better - worse))
        low, high = shares_interval(int(kinds[0]), int(kinds[1]), tasks, 0.95)
        held += low <= better - worse <= high
        alike = generator.multinomial(tasks, (worse, worse, 1 - 2 * worse))
        rejected += mcnemar(int(alike[0]), int(alike[1])) < 0.05
    assert held / NUM_REPEATS > LEAST_COVERAGE
    assert rejected / NUM_REPEATS < 0.09


def test_flipped_signs_seldom_tell_alike_policies_apart() -> None:
    generator = np.random.default_rng(5)
    p_values = [sign_flips(generator.normal(size=12).tolist()) for _ in range(400)]
    assert np.mean([p_value < 0.05 for p_value in p_values]) < 0.085


def test_a_single_value_has_no_interval() -> None:
    assert mean_interval([1.0]) == (None, None)
