"""Lays sequences end to end and stores shared prefixes once.

One rule: a token's result depends only on its own sequence, so sharing a prefix (a batch's system prompt, a group's
question) saves computation and changes nothing else; the gradients of all sharing sequences add up in it.
It knows only token ids: no masks, losses or model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A shorter common prefix saves less than the extra piece costs in attention.
MIN_SHARED_TOKENS = 16

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PackedPiece:
    """Contiguous tokens that belong to the same set of sequences."""

    start: int
    """Position of its first token in the row."""
    length: int
    context: tuple[tuple[int, int], ...] = ()
    """(start, length) of the pieces that precede it in its sequences, in order."""

    @property
    def context_length(self) -> int:
        return sum(length for _, length in self.context)


@dataclass(frozen=True, eq=False)
class Packing:
    """The layout of sequences in one row of tokens."""

    token_ids: Ids
    positions: Ids
    """Each token's position in its sequence, counted from 0."""
    pieces: tuple[PackedPiece, ...]
    """In layout order, without gaps."""
    rows: tuple[Ids, ...]
    """For each sequence, the locations of its tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence in tokens."""
        return max(piece.context_length + piece.length for piece in self.pieces)

    @cached_property
    def key_index(self) -> Ids | None:
        """For each piece in turn, the locations of its context and its own tokens; None without sharing."""
        if not any(piece.context for piece in self.pieces):
            return None
        spans = [span for piece in self.pieces for span in (*piece.context, (piece.start, piece.length))]
        return np.concatenate([np.arange(start, start + length) for start, length in spans])

    def on_device(self, device: torch.device) -> DeviceIndex:
        """Index tensors for variable-length kernels; moved to the device once."""
        if device not in self._device_indices:
            queries = [piece.length for piece in self.pieces]
            keys = [piece.context_length + piece.length for piece in self.pieces]
            index = None if self.key_index is None else torch.from_numpy(self.key_index).to(device)
            self._device_indices[device] = DeviceIndex(
                _ends(queries, device), _ends(keys, device), max(queries), max(keys), index
            )
        return self._device_indices[device]

    _device_indices: dict[torch.device, DeviceIndex] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class DeviceIndex:
    """Cumulative query and key lengths of the pieces, the maximum of each, and the locations of the keys."""

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    key_index: Tensor | None


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)


def pack(sequences: Sequence[Ids], *, share: bool) -> Packing:
    """Lay out sequences of token ids; empty ones take no space. Without any tokens, it holds one token 0."""
    builder = _Builder(sequences)
    filled = [index for index, ids in enumerate(sequences) if len(ids)]
    if share:
        builder.add_tree(sorted(filled, key=lambda index: (sort_key(sequences[index]), index)), 0, ())
    else:
        for index in filled:
            builder.add_piece([index], 0, len(sequences[index]), ())
    return builder.build()


class _Builder:
    """Collects pieces; `context` is the chain of pieces that precede a new one."""

    def __init__(self, sequences: Sequence[Ids]) -> None:
        self._sequences = sequences
        self._rows = [np.zeros(len(ids), np.int64) for ids in sequences]
        self._pieces: list[PackedPiece] = []
        self._token_ids: list[Ids] = []
        self._positions: list[Ids] = []
        self._end = 0

    def add_tree(self, members: Sequence[int], depth: int, context: tuple[tuple[int, int], ...]) -> None:
        """Lay out the rest of sorted sequences that share their first `depth` tokens, already laid out."""
        if not members:
            return
        if len(members) == 1:
            self.add_piece(members, depth, len(self._sequences[members[0]]), context)
            return
        common = common_prefix(self._sequences[members[0]], self._sequences[members[-1]])
        if common - depth >= MIN_SHARED_TOKENS:
            context = (*context, self.add_piece(members, depth, common, context))
            depth = common
        ended = [m for m in members if len(self._sequences[m]) == common]
        for member in ended:
            self.add_piece([member], depth, common, context)
        rest = members[len(ended) :]  # a prefix sorts before the sequences that extend it
        heads = np.array([self._sequences[m][common] for m in rest])
        for share in np.split(np.array(rest, dtype=np.int64), np.flatnonzero(np.diff(heads)) + 1):
            self.add_tree(share.tolist(), depth, context)

    def add_piece(
        self, members: Sequence[int], start: int, end: int, context: tuple[tuple[int, int], ...]
    ) -> tuple[int, int]:
        """Lay out tokens `start` to `end` of the first member on behalf of all members."""
        length = end - start
        if length:
            self._token_ids.append(self._sequences[members[0]][start:end])
            self._positions.append(np.arange(start, end))
            self._pieces.append(PackedPiece(self._end, length, context))
            for member in members:
                self._rows[member][start:end] = np.arange(self._end, self._end + length)
            self._end += length
        return self._end - length, length

    def build(self) -> Packing:
        if not self._pieces:
            return Packing(np.zeros(1, np.int64), np.zeros(1, np.int64), (PackedPiece(0, 1),), tuple(self._rows))
        token_ids, positions = np.concatenate(self._token_ids), np.concatenate(self._positions)
        return Packing(token_ids, positions, tuple(self._pieces), tuple(self._rows))


def common_prefix(first: Ids, second: Ids) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def sort_key(ids: Ids) -> bytes:
    return ids.astype(">i4").tobytes()


def plan_micro_batches(
    sequences: Sequence[Ids], budget: int, *, share: bool, num_ranks: int = 1
) -> list[list[list[int]]]:
    """Plan each rank's micro-batches as positions in `sequences`: equal counts per rank, about equal work.

    No micro-batch exceeds `budget` tokens, counting shared ones once, unless it is a single sequence. With fewer
    sequences than ranks, some micro-batches are empty.
    """

    def cost(members: Sequence[int]) -> int:
        return pack([sequences[m] for m in members], share=share).num_tokens

    by_length = sorted(range(len(sequences)), key=lambda index: (-len(sequences[index]), index))
    plans = [_plan(_spread, by_length, sequences, budget, num_ranks, cost)]
    if share:
        alike = sorted(range(len(sequences)), key=lambda index: (sort_key(sequences[index]), index))
        plans.append(_plan(_cut, alike, sequences, budget, num_ranks, cost))
    best = min(plans, key=lambda bins: (len(bins), max(map(cost, bins))))
    return [best[rank::num_ranks] for rank in range(num_ranks)]


Bins = list[list[int]]


def _plan(
    fill: Callable[[Sequence[int], Sequence[Ids], int], Bins],
    order: Sequence[int],
    sequences: Sequence[Ids],
    budget: int,
    num_ranks: int,
    cost: Callable[[Sequence[int]], int],
) -> Bins:
    """Fill as few bins as the budget allows."""
    num_bins = num_ranks * max(1, -(-cost(order) // (budget * num_ranks)))
    while True:
        bins = fill(order, sequences, num_bins)
        if num_bins >= len(sequences) or all(len(b) <= 1 or cost(b) <= budget for b in bins):
            return bins
        num_bins += num_ranks


def _spread(order: Sequence[int], sequences: Sequence[Ids], num_bins: int) -> Bins:
    """Put each sequence, longest first, into the emptiest bin."""
    bins: Bins = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in order:
        lightest = loads.index(min(loads))
        bins[lightest].append(index)
        loads[lightest] += len(sequences[index])
    return bins


def _cut(order: Sequence[int], sequences: Sequence[Ids], num_bins: int) -> Bins:
    """Keep neighbours, which share most, together; cut where the tokens each one adds reach equal shares."""
    added = [
        len(sequences[index]) - (common_prefix(sequences[order[i - 1]], sequences[index]) if i else 0)
        for i, index in enumerate(order)
    ]
    middles = np.cumsum(added) - np.array(added) / 2
    shares = np.minimum((middles * num_bins / max(1, sum(added))).astype(int), num_bins - 1)
    return [[index for index, share in zip(order, shares, strict=True) if share == b] for b in range(num_bins)]
