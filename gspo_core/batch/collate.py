"""Turns sequences into the tensors of micro-batches.

One rule: every function here is pure, so a batch is cut and laid out identically on every rank and after every crash,
and the cut never changes what is learned. It knows no model and no loss.

Shape suffixes: B sequences of a micro-batch, N scored tokens (those whose log-prob is wanted), T columns of the table
that holds the scored tokens of each sequence side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gspo_core.batch.balance import plan_groups
from gspo_core.batch.packing import Ids, Packing, pack, plan_micro_batches

Layout = Literal["shared", "packed", "padded"]


class InvalidSequence(ValueError):
    """The sequence cannot be trained on."""


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """One branch of one episode; the arrays have one entry per token."""

    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    """True for tokens that the policy sampled and training uses."""
    behavior_logprobs: NDArray[np.float32]
    turn_ids: NDArray[np.int32]
    staleness: NDArray[np.int32]
    """Staleness of each token in steps."""
    advantages: float | NDArray[np.float32]
    weight: float = 1.0
    """This branch's share of the episode's trained tokens; the branches of an episode sum to 1."""
    temperature: float = 1.0
    """The sampling temperature of the actions."""
    group: int | None = None
    """Sequences of one group are kept together in an update, and planned by `balance`. None: each is dealt alone."""

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array: NDArray[np.generic] = np.ascontiguousarray(getattr(self, name), dtype=dtype)
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
    """The input of one forward pass and the destinations of its results."""

    indices: tuple[int, ...]
    """Positions of its sequences in the batch."""
    packing: Packing | None
    """How the sequences lie end to end; None when they are padded."""
    token_ids: Tensor
    """(1, tokens) packed, or (B, longest) padded on the right."""
    positions: Tensor
    """Shaped like `token_ids`; counted from 0 in each sequence."""
    rows: Ids
    """For each scored token, the flat position of the token before it; not on the device."""
    rows_N: Tensor
    """The same on the device."""
    targets_N: Tensor
    temperatures_N: Tensor
    cells_N: Tensor
    """For each scored token, its flat cell in the table (B, T)."""
    action_mask_BT: Tensor
    behavior_logprobs_BT: Tensor
    turn_ids_BT: Tensor
    staleness_BT: Tensor
    advantages: Tensor
    """(B,), or (B, T) when a sequence of the batch has one per token."""
    weights_B: Tensor

    def table(self, values_N: Tensor) -> Tensor:
        """Arrange scored values side by side, one row per sequence, 0 in empty cells; differentiable."""
        shape = self.action_mask_BT.shape
        return values_N.new_zeros(shape.numel()).index_copy(0, self.cells_N, values_N).view(shape)


def deal_minibatches(groups: Sequence[int | None], num_minibatches: int, *, seed: int, step: int) -> list[list[int]]:
    """Deal a batch's sequences to its updates: shuffled by (seed, step), in nearly equal shares. A group stays whole
    where there are enough of them."""
    named = sorted({group for group in groups if group is not None})
    generator = np.random.default_rng([seed, step])
    if None in groups or len(named) < num_minibatches:
        order = generator.permutation(len(groups))
        shares = np.array_split(order, min(num_minibatches, len(groups)))
        return [sorted(int(index) for index in share) for share in shares]
    parts = np.array_split(generator.permutation(np.array(named)), num_minibatches)
    part_of = {int(group): number for number, part in enumerate(parts) for group in part}
    dealt: list[list[int]] = [[] for _ in parts]
    for index, group in enumerate(groups):
        if group is not None:
            dealt[part_of[group]].append(index)
    return dealt


def scored_places(sequence: TrainSequence, *, score_all: bool) -> NDArray[np.int64]:
    """Positions of the tokens to score: the actions, or all tokens that have a prefix."""
    return np.arange(1, sequence.num_tokens) if score_all else np.flatnonzero(sequence.action_mask)


def input_ids(sequence: TrainSequence, *, score_all: bool) -> Ids:
    """The tokens that the model must read for scoring, up to the last one it needs."""
    places = scored_places(sequence, score_all=score_all)
    return sequence.token_ids[: places[-1] if len(places) else 0].astype(np.int64)


def split_batch(
    sequences: Sequence[TrainSequence],
    indices: Sequence[int],
    budget: int,
    *,
    layout: Layout,
    score_all: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """The micro-batches of one rank for the sequences at `indices`; every rank gets the same number."""
    ids = [input_ids(sequences[index], score_all=score_all) for index in indices]
    groups = [sequences[index].group for index in indices]
    if layout == "padded":
        plan = plan_padded([len(i) for i in ids], budget, num_ranks=num_ranks)
    elif None in groups or not groups:
        plan = plan_micro_batches(ids, budget, share=layout == "shared", num_ranks=num_ranks)
    else:
        named = [group for group in groups if group is not None]
        plan = plan_groups(ids, named, budget, share=layout == "shared", num_ranks=num_ranks)
    return [
        collate(sequences, [indices[m] for m in members], layout=layout, score_all=score_all, device=device)
        for members in plan[rank]
    ]


def plan_padded(lengths: Sequence[int], budget: int, *, num_ranks: int = 1) -> list[list[list[int]]]:
    """Like `plan_micro_batches`, for padded rows; groups similar lengths to minimise waste."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    num_bins = num_ranks
    while True:
        bins = [[order[i] for i in share] for share in np.array_split(np.arange(len(order)), num_bins)]
        if num_bins >= len(lengths) or all(len(b) <= 1 or len(b) * lengths[b[0]] <= budget for b in bins):
            return [bins[rank::num_ranks] for rank in range(num_ranks)]
        num_bins += num_ranks


def collate(
    sequences: Sequence[TrainSequence],
    indices: Sequence[int],
    *,
    layout: Layout,
    score_all: bool = False,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Lay the sequences at `indices` out for the model."""
    chosen = [sequences[index] for index in indices]
    places = [scored_places(s, score_all=score_all) for s in chosen]
    num_columns = max((len(p) for p in places), default=0)
    cells = _joined([row * num_columns + np.arange(len(p)) for row, p in enumerate(places)], np.int64)

    def tensor(values: ArrayLike, dtype: type) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=dtype)).to(device)  # copy: the arrays may be read-only

    def scored(values: Callable[[TrainSequence], ArrayLike], dtype: type) -> NDArray[np.generic]:
        """One value per scored token."""
        pieces = [np.broadcast_to(values(s), s.num_tokens)[p] for s, p in zip(chosen, places, strict=True)]
        return _joined(pieces, dtype)

    def table(values: Callable[[TrainSequence], ArrayLike], dtype: type) -> Tensor:
        filled: NDArray[np.generic] = np.zeros(len(chosen) * num_columns, dtype=dtype)
        filled[cells] = scored(values, dtype)
        return tensor(filled.reshape(len(chosen), num_columns), dtype)

    ids = [input_ids(s, score_all=score_all) for s in chosen]
    packing = None if layout == "padded" else pack(ids, share=layout == "shared")
    token_ids, positions, rows = _padded(ids) if packing is None else _packed(packing)
    if any(isinstance(s.advantages, np.ndarray) for s in sequences):
        advantages = table(lambda s: s.advantages, np.float32)
    else:
        advantages = tensor([float(s.advantages) for s in chosen], np.float32)
    before = _joined([row[p - 1] for row, p in zip(rows, places, strict=True)], np.int64)
    return MicroBatch(
        indices=tuple(indices),
        packing=packing,
        token_ids=tensor(token_ids, np.int64),
        positions=tensor(positions, np.int64),
        rows=before.astype(np.int64, copy=False),
        rows_N=tensor(before, np.int64),
        targets_N=tensor(scored(lambda s: s.token_ids, np.int64), np.int64),
        temperatures_N=tensor(scored(lambda s: s.temperature, np.float32), np.float32),
        cells_N=tensor(cells, np.int64),
        action_mask_BT=table(lambda s: s.action_mask, np.bool_),
        behavior_logprobs_BT=table(lambda s: s.behavior_logprobs, np.float32),
        turn_ids_BT=table(lambda s: s.turn_ids, np.int64),
        staleness_BT=table(lambda s: s.staleness, np.int64),
        advantages=advantages,
        weights_B=tensor([s.weight for s in chosen], np.float32),
    )


def _joined(pieces: Sequence[NDArray[np.generic]], dtype: type) -> NDArray[np.generic]:
    return np.concatenate([*pieces, np.zeros(0, dtype)]).astype(dtype)


def _packed(packing: Packing) -> tuple[Ids, Ids, Sequence[Ids]]:
    """Token ids and positions as (1, tokens), and the location of each sequence's tokens in them."""
    return packing.token_ids[None], packing.positions[None], packing.rows


def _padded(ids: Sequence[Ids]) -> tuple[Ids, Ids, Sequence[Ids]]:
    """Like `_packed`, as (B, longest), right-padded with token 0, which no scored token can see."""
    longest = max([1, *(len(i) for i in ids)])
    token_ids = np.zeros((max(1, len(ids)), longest), np.int64)
    for row, sequence_ids in enumerate(ids):
        token_ids[row, : len(sequence_ids)] = sequence_ids
    positions = np.broadcast_to(np.arange(longest), token_ids.shape)
    return token_ids, positions, [row * longest + np.arange(len(i)) for row, i in enumerate(ids)]
