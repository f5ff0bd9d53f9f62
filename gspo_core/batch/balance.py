"""Plans micro-batches of whole groups, so that ranks that wait for each other have about equal work.

One rule: a pure function of the sequences, so every rank plans the same. Work is counted in tokens: those that are laid
out, the pairs that attention compares, and the keys that members gather from a shared beginning. It lays nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from gspo_core.batch.packing import Bins, Ids, Packing, common_prefix, pack, plan_micro_batches, sort_key
from gspo_core.batch.refine import Costs, refined

# Products of attention for one pair, over those of the layers for one token: 0.6B parameters 1/5,000, 8B 1/28,000.
PAIRS_PER_TOKEN = 16_384
# What a gathered key and value take, over what a token leaves for the backward pass: about 1/50 where eight heads
# share them, 1/12 where none do.
KEYS_PER_TOKEN = 16
# Numbers of bins that are tried beyond the fewest, in steps of the number of ranks.
TRIES = 3
# How many of the best plans are refined.
REFINED = 3


@dataclass(frozen=True)
class _Family:
    """Sequences of one group, and what they have in common."""

    members: tuple[int, ...]
    shared: int


@dataclass(frozen=True)
class _Chunk:
    members: tuple[int, ...]
    tokens: float


def room_of(packing: Packing) -> float:
    """What a micro-batch takes of the budget: its tokens, and the keys that its members gather."""
    return packing.num_tokens + sum(piece.context_length for piece in packing.pieces) / KEYS_PER_TOKEN


def work_of(packing: Packing) -> float:
    """What a micro-batch costs to compute, in tokens."""
    pairs = sum(piece.length * (piece.context_length + piece.length / 2) for piece in packing.pieces)
    return packing.num_tokens + pairs / PAIRS_PER_TOKEN


def plan_groups(
    sequences: Sequence[Ids], groups: Sequence[int], budget: int, *, share: bool, num_ranks: int = 1
) -> list[Bins]:
    """Like `plan_micro_batches`, keeping the members of a group together where the budget allows."""
    packed: dict[tuple[int, ...], Packing] = {}

    def packing(members: Sequence[int]) -> Packing:
        key = tuple(members)
        if key not in packed:
            packed[key] = pack([sequences[m] for m in members], share=share)
        return packed[key]

    families = _families(sequences, groups, share=share)
    scattered = plan_micro_batches(sequences, budget, share=share, num_ranks=num_ranks)
    plans = [list(chain.from_iterable(scattered))]
    plans += _even_plans(sequences, families, budget, num_ranks)
    plans += _plans(sequences, families, budget, num_ranks)
    fitting = [one for one in plans if _fits(one, budget, packing)] or plans[:1]

    def waited(bins: Bins) -> float:
        return _lock_step(bins, num_ranks, packing)

    if num_ranks > 1:
        costs = _costs(sequences, families, budget)
        evened = [refined(one, num_ranks, costs) for one in sorted(fitting, key=waited)[:REFINED]]
        fitting += [one for one in evened if _fits(one, budget, packing)]
    least: Bins = min(fitting, key=waited)
    best = sorted(least, key=lambda members: -work_of(packing(members)))
    return [best[rank::num_ranks] for rank in range(num_ranks)]


def _costs(sequences: Sequence[Ids], families: Sequence[_Family], budget: int) -> Costs:
    """As `work_of` and `room_of` count, where members have nothing in common but the beginning that all share."""
    group, work, room = [0] * len(sequences), [0.0] * len(sequences), [0.0] * len(sequences)
    for number, family in enumerate(families):
        for member in family.members:
            own = len(sequences[member]) - family.shared
            group[member] = number
            work[member] = own + own * (family.shared + own / 2) / PAIRS_PER_TOKEN
            room[member] = own + family.shared / KEYS_PER_TOKEN
    shared = [family.shared for family in families]
    return Costs(group, work, room, [one + one * one / 2 / PAIRS_PER_TOKEN for one in shared], shared, budget)


def _fits(bins: Bins, budget: int, packing: Callable[[Sequence[int]], Packing]) -> bool:
    return all(len(one) <= 1 or room_of(packing(one)) <= budget for one in bins)


def _lock_step(bins: Bins, num_ranks: int, packing: Callable[[Sequence[int]], Packing]) -> float:
    """The work of the busiest rank in each round, together: ranks wait for each other at every layer. Micro-batches of
    about equal work make a round."""
    return sum(sorted((work_of(packing(one)) for one in bins), reverse=True)[::num_ranks])


def _families(sequences: Sequence[Ids], groups: Sequence[int], *, share: bool) -> list[_Family]:
    by_group: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        by_group.setdefault(group, []).append(index)
    return [_Family(tuple(members), _shared(sequences, members) if share else 0) for members in by_group.values()]


def _shared(sequences: Sequence[Ids], members: Sequence[int]) -> int:
    if len(members) < 2:
        return 0
    ends = sorted((sequences[member] for member in members), key=sort_key)
    return common_prefix(ends[0], ends[-1])


def _plans(sequences: Sequence[Ids], families: Sequence[_Family], budget: int, num_ranks: int) -> Iterator[Bins]:
    """Plans of some numbers of bins, beginning with the fewest that could be enough."""
    total = sum(one.shared + sum(len(sequences[m]) - one.shared for m in one.members) for one in families)
    fewest = num_ranks * max(1, -(-total // (budget * num_ranks)))
    found = 0
    for num_bins in range(fewest, max(fewest, len(sequences)) + num_ranks, num_ranks):
        target = min(float(budget), 1.02 * total / num_bins) if found else float(budget)
        chunks = [chunk for family in families for chunk in _chunks(sequences, family, target)]
        bins = _spread(chunks, num_bins)
        if all(len(one) <= 1 or _room(sequences, families, one) <= budget for one in bins):
            found += 1
            yield bins
            yield _spread([c for f in families for c in _chunks(sequences, f, total / num_bins)], num_bins)
        if found > TRIES:
            return


def _even_plans(sequences: Sequence[Ids], families: Sequence[_Family], budget: int, num_ranks: int) -> Iterator[Bins]:
    """Plans where each bin is a piece of one group: the group with the largest pieces is cut once more, until every
    rank has as many."""
    numbers = [len(_chunks(sequences, family, float(budget))) for family in families]
    largest = [max(chunk.tokens for chunk in _cut_in(sequences, f, n)) for f, n in zip(families, numbers, strict=True)]
    num_sequences = sum(len(family.members) for family in families)
    for _ in range(TRIES):
        num_bins = num_ranks * -(-sum(numbers) // num_ranks)
        while sum(numbers) < min(num_bins, num_sequences):
            whole = [size if n < len(f.members) else 0 for size, n, f in zip(largest, numbers, families, strict=True)]
            place = whole.index(max(whole))
            numbers[place] += 1
            largest[place] = max(chunk.tokens for chunk in _cut_in(sequences, families[place], numbers[place]))
        if sum(numbers) != num_bins:
            return
        cut = [c for f, n in zip(families, numbers, strict=True) for c in _cut_in(sequences, f, n)]
        yield [list(chunk.members) for chunk in cut] + [[] for _ in range(num_bins - len(cut))]
        if num_bins == num_sequences:
            return
        numbers[largest.index(max(largest))] += 1


def _room(sequences: Sequence[Ids], families: Sequence[_Family], members: Sequence[int]) -> float:
    chosen = set(members)
    room = 0.0
    for family in families:
        own = [member for member in family.members if member in chosen]
        if own:
            room += family.shared + sum(len(sequences[member]) - family.shared for member in own)
            room += len(own) * family.shared / KEYS_PER_TOKEN
    return room


def _chunks(sequences: Sequence[Ids], family: _Family, target: float) -> list[_Chunk]:
    """A group in pieces of at most about `target` tokens, each with what its members share once."""
    per_member = family.shared / KEYS_PER_TOKEN
    rest = sum(len(sequences[member]) - family.shared + per_member for member in family.members)
    free, most = target - family.shared, len(family.members)
    number = most if free <= 0 else min(most, max(1, -(-int(rest) // max(1, int(free)))))
    while True:
        chunks = _cut_in(sequences, family, number)
        if number >= most or max(chunk.tokens for chunk in chunks) <= target:
            return chunks
        number += 1


def _cut_in(sequences: Sequence[Ids], family: _Family, number: int) -> list[_Chunk]:
    """A group in that many pieces of about equal size."""
    per_member = family.shared / KEYS_PER_TOKEN
    sizes = {member: len(sequences[member]) - family.shared + per_member for member in family.members}
    parts = _spread([_Chunk((member,), size) for member, size in sizes.items()], number)
    return [_Chunk(tuple(part), family.shared + sum(sizes[m] for m in part)) for part in parts if part]


def _spread(chunks: Sequence[_Chunk], num_bins: int) -> Bins:
    """Each chunk, largest first, into the emptiest bin."""
    bins: Bins = [[] for _ in range(num_bins)]
    loads = [0.0] * num_bins
    for chunk in sorted(chunks, key=lambda one: (-one.tokens, one.members)):
        lightest = loads.index(min(loads))
        bins[lightest].extend(chunk.members)
        loads[lightest] += chunk.tokens
    return bins
