"""Every pair of values stands in a row, unless no possible row can hold it."""

from __future__ import annotations

import random
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ladder.covering import Values, cover, pairs_of

sizes = st.lists(st.integers(1, 4), min_size=2, max_size=4)


def axes_of(counts: list[int]) -> dict[str, tuple[str, ...]]:
    return {
        f"axis{number}": tuple(f"{number}.{value}" for value in range(count)) for number, count in enumerate(counts)
    }


@settings(deadline=None)
@given(sizes, st.integers(0, 2**16), st.floats(0, 1), st.integers(0, 3))
def test_each_pair_stands_in_a_row_or_in_no_possible_one(counts: list[int], seed: int, share: float, num: int) -> None:
    axes, generator = axes_of(counts), random.Random(seed)
    every = list(product(*axes.values()))
    possible = {row for row in every if generator.random() <= share}
    given_rows = [row for row in every if row in possible][:num]
    found = cover(
        axes, possible=possible.__contains__, cost=lambda row: 1.0, generator=random.Random(seed), given=given_rows
    )
    rows: list[Values] = [*given_rows, *found.rows]
    names = list(axes)
    assert set(rows) <= possible
    held = {pair for row in rows for pair in pairs_of(names, row)}
    assert held == {pair for row in possible for pair in pairs_of(names, row)}
    pairs = {pair for row in every for pair in pairs_of(names, row)}
    assert pairs == held | set(found.impossible)
    assert not held & set(found.impossible)


def test_pairs_need_far_fewer_rows_than_all_combinations() -> None:
    axes = axes_of([4, 4, 4, 4])
    found = cover(axes, possible=lambda row: True, cost=lambda row: 1.0, generator=random.Random(0))
    assert 16 <= len(found.rows) <= 30  # of 256


def test_the_same_generator_draws_the_same_rows_and_another_one_others() -> None:
    axes = axes_of([3, 4, 5])

    def rows(seed: int) -> list[Values]:
        return cover(axes, possible=lambda row: True, cost=lambda row: 1.0, generator=random.Random(seed)).rows

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_rows_that_cost_less_are_taken_where_they_do() -> None:
    axes = axes_of([2, 2, 3])
    dear = axes["axis2"][2]
    found = cover(
        axes, possible=lambda row: True, cost=lambda row: 9.0 if dear in row else 1.0, generator=random.Random(0)
    )
    assert sum(dear in row for row in found.rows) == 2
