"""Evens out planned micro-batches: moves and swaps sequences until no such step makes ranks wait less.

One rule: a pure function of the numbers given, so every rank finds the same. Work and room are counted as `balance`
counts them for groups whose members share one beginning; a plan that breaks the budget by a closer count is the
caller's to discard. It makes no more micro-batches than there were, and fewer where a whole round is left empty.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Bins = list[list[int]]
# Steps that are taken at most; each costs a few milliseconds, and most plans need fewer than twenty.
MAX_STEPS = 40


@dataclass(frozen=True)
class Costs:
    """What each sequence adds to the micro-batch that it is in, and each group, once, to all that hold a part of it."""

    group: Sequence[int]
    """By sequence; an index into the lists of groups."""
    work: Sequence[float]
    room: Sequence[float]
    group_work: Sequence[float]
    group_room: Sequence[float]
    budget: float


class _Bin:
    """A micro-batch with its sums, and its members by their work."""

    def __init__(self, members: Sequence[int], costs: Costs) -> None:
        self.members = sorted(members, key=lambda member: (costs.work[member], member))
        self.works = [costs.work[member] for member in self.members]
        self.groups = Counter(costs.group[member] for member in self.members)
        self.work = sum(self.works) + sum(costs.group_work[group] for group in self.groups)
        self.room = sum(costs.room[member] for member in members) + sum(costs.group_room[g] for g in self.groups)

    def changed(self, out: int | None, into: int | None, costs: Costs) -> tuple[float, float, int]:
        """Its work, its room and how many it holds after one left and another came."""
        work, room, number = self.work, self.room, len(self.members)
        left, came = (None if one is None else costs.group[one] for one in (out, into))
        for one, group, sign in ((out, left, -1), (into, came, 1)):
            if one is not None and group is not None:
                number += sign
                is_last = left != came and self.groups[group] == (1 if sign < 0 else 0)
                work += sign * (costs.work[one] + (costs.group_work[group] if is_last else 0))
                room += sign * (costs.room[one] + (costs.group_room[group] if is_last else 0))
        return work, room, number


@dataclass(frozen=True)
class _Step:
    """One sequence from the first micro-batch to the second, and another one back."""

    first: int
    second: int
    member: int
    back: int | None


def refined(bins: Bins, num_ranks: int, costs: Costs) -> Bins:
    """The same sequences in at most as many micro-batches, a multiple of the number of ranks."""
    found = [_Bin(one, costs) for one in bins]
    for _ in range(MAX_STEPS):
        step = _next_step(found, num_ranks, costs)
        if step is None:
            break
        first, second = found[step.first].members, found[step.second].members
        back = [] if step.back is None else [step.back]
        found[step.first] = _Bin([one for one in first if one != step.member] + back, costs)
        found[step.second] = _Bin([one for one in second if one != step.back] + [step.member], costs)
    filled = [one.members for one in found if one.members]
    return filled + [[] for _ in range(-len(filled) % num_ranks)]


def _next_step(bins: Sequence[_Bin], num_ranks: int, costs: Costs) -> _Step | None:
    """The best step out of the first micro-batch that a round waits for and that has one."""
    works = [one.work for one in bins]
    order = sorted(range(len(bins)), key=lambda place: (-works[place], place))
    for first in order[::num_ranks]:
        best, least = None, _lock_step(works, num_ranks) * (1 - 1e-9)
        for second in order:
            if second != first:
                for step, changed in _between(first, second, bins, costs):
                    waited = _lock_step([*works, *changed], num_ranks, without=(works[first], works[second]))
                    if waited < least:
                        best, least = step, waited
        if best is not None:
            return best
    return None


def _lock_step(works: Sequence[float], num_ranks: int, without: Sequence[float] = ()) -> float:
    """What the ranks wait for, all rounds together; a round is made of micro-batches of about equal work."""
    left = sorted(works, reverse=True)
    for work in without:
        left.remove(work)
    return sum(left[::num_ranks])


def _between(
    first: int, second: int, bins: Sequence[_Bin], costs: Costs
) -> Iterator[tuple[_Step, tuple[float, float]]]:
    """Each sequence of the first alone, or for those two of the second that would bring both nearest to each other."""
    ours, theirs = bins[first], bins[second]
    for member, work in zip(ours.members, ours.works, strict=True):
        place = bisect.bisect(theirs.works, work - (ours.work - theirs.work) / 2)
        backs: list[int | None] = [None, *theirs.members[max(0, place - 1) : place + 1]]
        for back in backs:
            mine, others = ours.changed(member, back, costs), theirs.changed(back, member, costs)
            fits = all(number <= 1 or room <= costs.budget for _, room, number in (mine, others))
            if fits and mine[0] < ours.work:
                yield _Step(first, second, member, back), (mine[0], others[0])
