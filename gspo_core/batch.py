"""From sequences to the tensors of micro-batches.

One rule: everything here is a pure function of its arguments, so the same batch is cut and laid out in the same way on
every rank and after every crash, and how it is cut never changes what is learned. It knows no model and no loss.

Shape suffixes: B sequences of a micro-batch, N scored tokens (those whose log-prob is wanted), T columns of the table
that holds the scored tokens of each sequence side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Layout = Literal["packed", "padded"]


class InvalidSequence(ValueError):
    """A sequence that cannot be trained on."""


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """One branch of one episode; the arrays have one entry per token."""

    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    """True where the policy sampled the token and it is to be trained."""
    behavior_logprobs: NDArray[np.float32]
    turn_ids: NDArray[np.int32]
    staleness: NDArray[np.int32]
    """In steps."""
    advantages: float | NDArray[np.float32]
    weight: float = 1.0
    """Branches of one episode share a weight of 1."""
    temperature: float = 1.0
    """At which the actions were sampled."""

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array: NDArray[Any] = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if array.shape != (self.num_tokens,):
                raise InvalidSequence(f"{name} has the shape {array.shape} in a sequence of {self.num_tokens} tokens")
            object.__setattr__(self, name, array)
        if not isinstance(self.advantages, (int, float)):
            advantages = np.ascontiguousarray(self.advantages, dtype=np.float32)
            if advantages.ndim == 0:
                object.__setattr__(self, "advantages", float(advantages))
            elif advantages.shape == (self.num_tokens,):
                object.__setattr__(self, "advantages", advantages)
            else:
                raise InvalidSequence(f"advantages have the shape {advantages.shape}, not ({self.num_tokens},)")
        self._check_values()

    def _check_values(self) -> None:
        if not self.num_tokens:
            raise InvalidSequence("a sequence has at least one token")
        if self.action_mask[0]:
            raise InvalidSequence("the first token has no prefix, so it cannot be an action")
        if not np.isfinite(self.behavior_logprobs[self.action_mask]).all():
            raise InvalidSequence("a behaviour log-prob of an action is not finite: the recorded data is corrupt")
        advantages = self.advantages
        if not np.isfinite(advantages if isinstance(advantages, float | int) else advantages[self.action_mask]).all():
            raise InvalidSequence("an advantage is not finite")
        if not (0 < self.temperature < float("inf")):
            raise InvalidSequence(f"the temperature is positive, not {self.temperature}")
        if not (0 < self.weight < float("inf")):
            raise InvalidSequence(f"the weight is positive, not {self.weight}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_actions(self) -> int:
        return int(np.count_nonzero(self.action_mask))


_ARRAYS = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "turn_ids": np.int32,
    "staleness": np.int32,
}


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward pass sees, and where its results belong."""

    indices: tuple[int, ...]
    """Positions of its sequences in the batch."""
    token_ids: Tensor
    """(1, tokens) packed, or (B, longest) padded on the right."""
    positions: Tensor
    """As `token_ids`; counted from 0 in each sequence."""
    lengths: tuple[int, ...] | None
    """Of the packed sequences, in order; None when padded."""
    rows_N: Tensor
    """For each scored token, the flat position of the token before it."""
    targets_N: Tensor
    temperatures_N: Tensor
    cells_N: Tensor
    """For each scored token, its flat cell in the table (B, T)."""
    table_shape: tuple[int, int]
    action_mask_BT: Tensor
    behavior_logprobs_BT: Tensor
    turn_ids_BT: Tensor
    staleness_BT: Tensor
    advantages: Tensor
    """(B,), or (B, T) when a sequence of the batch has one per token."""
    weights_B: Tensor

    def table(self, values_N: Tensor) -> Tensor:
        """Scored values side by side, one row per sequence, 0 in empty cells; differentiable."""
        rows, columns = self.table_shape
        return values_N.new_zeros(rows * columns).index_copy(0, self.cells_N, values_N).view(rows, columns)


def deal_minibatches(num_sequences: int, num_minibatches: int, *, seed: int, step: int) -> list[list[int]]:
    """Which sequences each update of a batch trains on: shuffled by (seed, step), in nearly equal shares."""
    order = np.random.default_rng([seed, step]).permutation(num_sequences)
    shares = np.array_split(order, min(num_minibatches, num_sequences))
    return [sorted(int(index) for index in share) for share in shares]


def plan_micro_batches(
    lengths: Sequence[int], budget: int, *, layout: Layout = "packed", num_ranks: int = 1
) -> list[list[list[int]]]:
    """For each rank, its micro-batches as lists of positions in `lengths`: as many on every rank, about equally long.

    No micro-batch costs more than `budget` tokens unless it is a single sequence. With fewer sequences than ranks some
    micro-batches are empty.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    minimum = -(-sum(lengths) // budget)
    num_bins = max(1, -(-minimum // num_ranks)) * num_ranks
    while True:
        bins = _fill(order, lengths, num_bins, layout)
        if num_bins >= len(lengths) or all(len(b) == 1 or _cost(b, lengths, layout) <= budget for b in bins):
            break
        num_bins += num_ranks
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _fill(order: Sequence[int], lengths: Sequence[int], num_bins: int, layout: Layout) -> list[list[int]]:
    if layout == "padded":  # neighbours in length waste the least padding
        return [[order[i] for i in share] for share in np.array_split(np.arange(len(order)), num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for index in order:
        target = loads.index(min(loads))
        bins[target].append(index)
        loads[target] += lengths[index]
    return bins


def _cost(members: Sequence[int], lengths: Sequence[int], layout: Layout) -> int:
    sizes = [lengths[index] for index in members]
    return max(sizes, default=0) * len(sizes) if layout == "padded" else sum(sizes)


def collate(
    sequences: Sequence[TrainSequence],
    indices: Sequence[int],
    *,
    layout: Layout = "packed",
    device: torch.device | str = "cpu",
    score_all: bool = False,
) -> MicroBatch:
    """Lay the sequences at `indices` out for the model. Scored are the actions, or with `score_all` all but the first
    token of each."""
    chosen = [sequences[index] for index in indices]
    places = [np.arange(1, s.num_tokens) if score_all else np.flatnonzero(s.action_mask) for s in chosen]
    longest = max((s.num_tokens for s in chosen), default=1)
    num_columns = max((len(p) for p in places), default=0)
    starts = (
        np.cumsum([0] + [s.num_tokens for s in chosen])[:-1] if layout == "packed" else np.arange(len(chosen)) * longest
    )

    def scored(values: Callable[[TrainSequence], Any], dtype: type) -> NDArray[Any]:
        """One value per scored token."""
        pieces = [np.broadcast_to(values(s), s.num_tokens)[p] for s, p in zip(chosen, places, strict=True)]
        return np.concatenate([*pieces, np.zeros(0)]).astype(dtype)

    cells = np.concatenate([row * num_columns + np.arange(len(p)) for row, p in enumerate(places)] + [np.zeros(0)])

    def table(values: Callable[[TrainSequence], Any], dtype: type) -> Tensor:
        filled: NDArray[Any] = np.zeros(len(chosen) * num_columns, dtype=dtype)
        filled[cells.astype(np.int64)] = scored(values, dtype)
        return torch.from_numpy(filled.reshape(len(chosen), num_columns)).to(device)

    def tensor(values: Any, dtype: type) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device)

    rows = [start + p - 1 for start, p in zip(starts, places, strict=True)]
    token_ids, positions = _lay_out(chosen, layout, longest)
    if any(isinstance(s.advantages, np.ndarray) for s in sequences):
        advantages = table(lambda s: s.advantages, np.float32)
    else:
        advantages = tensor([s.advantages for s in chosen], np.float32)
    return MicroBatch(
        indices=tuple(indices),
        token_ids=tensor(token_ids, np.int64),
        positions=tensor(positions, np.int64),
        lengths=tuple(s.num_tokens for s in chosen) if layout == "packed" else None,
        rows_N=tensor(np.concatenate([*rows, np.zeros(0)]), np.int64),
        targets_N=tensor(scored(lambda s: s.token_ids, np.int64), np.int64),
        temperatures_N=tensor(scored(lambda s: s.temperature, np.float32), np.float32),
        cells_N=tensor(cells, np.int64),
        table_shape=(len(chosen), num_columns),
        action_mask_BT=table(lambda s: s.action_mask, np.bool_),
        behavior_logprobs_BT=table(lambda s: s.behavior_logprobs, np.float32),
        turn_ids_BT=table(lambda s: s.turn_ids, np.int64),
        staleness_BT=table(lambda s: s.staleness, np.int64),
        advantages=advantages,
        weights_B=tensor([s.weight for s in chosen], np.float32),
    )


def _lay_out(chosen: Sequence[TrainSequence], layout: Layout, longest: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Token ids and positions, (1, tokens) packed or (B, longest) padded on the right with token 0."""
    if not chosen:  # a rank without sequences still runs the model, because the others wait for it
        return np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
    if layout == "packed":
        token_ids = np.concatenate([s.token_ids for s in chosen])[None]
        return token_ids, np.concatenate([np.arange(s.num_tokens) for s in chosen])[None]
    token_ids = np.zeros((len(chosen), longest), np.int64)
    for row, sequence in enumerate(chosen):
        token_ids[row, : sequence.num_tokens] = sequence.token_ids
    return token_ids, np.broadcast_to(np.arange(longest), token_ids.shape).copy()
