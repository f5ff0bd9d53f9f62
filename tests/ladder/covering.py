"""Few rows that hold every pair of values of two axes, among rows that are possible.

Rule: a pair that no possible row holds is told, never dropped in silence. The same generator gives the same rows. What
an axis means is not known here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypeAlias

Values: TypeAlias = tuple[Hashable, ...]
"""One value for each axis, in the order of the axes."""
Pair: TypeAlias = tuple[tuple[str, Hashable], tuple[str, Hashable]]
# Few rows come first: each starts a job. Of rows that hold about as many new pairs the cheapest is taken.
_WEIGHT_OF_COST = 0.1


@dataclass(frozen=True)
class Covering:
    rows: list[Values]
    impossible: list[Pair]
    """Pairs of values that no possible row holds."""


def pairs_of(names: Sequence[str], row: Values) -> Iterator[Pair]:
    yield from combinations(zip(names, row, strict=True), 2)


def cover(
    axes: Mapping[str, Sequence[Hashable]],
    *,
    possible: Callable[[Values], bool],
    cost: Callable[[Values], float],
    generator: random.Random,
    given: Iterable[Values] = (),
) -> Covering:
    """``given`` rows are there anyway: what they hold needs no other row. Of the rest, the row that holds the most new
    pairs comes next, as long as one is missing; costs and then ``generator`` decide between those that are alike."""
    names = list(axes)
    numbers = {pair: number for number, pair in enumerate(_all_pairs(axes))}
    candidates = [row for row in product(*axes.values()) if possible(row)]
    generator.shuffle(candidates)
    holds = [_mask(numbers, names, row) for row in candidates]
    reachable = 0
    for mask in holds:
        reachable |= mask
    missing = reachable
    for row in given:
        missing &= ~_mask(numbers, names, row)
    costs = [cost(row) ** _WEIGHT_OF_COST for row in candidates]
    rows = []
    while missing:
        best = max(range(len(candidates)), key=lambda at: (holds[at] & missing).bit_count() / costs[at])
        missing &= ~holds[best]
        rows.append(candidates[best])
    return Covering(rows, [pair for pair, number in numbers.items() if not reachable >> number & 1])


def _all_pairs(axes: Mapping[str, Sequence[Hashable]]) -> Iterator[Pair]:
    for (first, ones), (second, others) in combinations(axes.items(), 2):
        yield from (((first, one), (second, other)) for one, other in product(ones, others))


def _mask(numbers: Mapping[Pair, int], names: Sequence[str], row: Values) -> int:
    """One bit for each pair that the row holds; a value beside the axes holds none."""
    return sum(1 << numbers[pair] for pair in pairs_of(names, row) if pair in numbers)
