"""Averages log ratios over sequences, turns or single tokens.

One rule: lengths are integer counts from the action mask, with no epsilon added to a denominator.
It decides nothing about clipping.

Shapes: B sequences, T tokens; N units (B sequences, or all turns, or B x T tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_core.objective.inputs import Inputs
from gspo_core.objective_config import ObjectiveConfig


@dataclass(frozen=True)
class Pool:
    """Averages per unit. `index_BT` is None for sequences and tokens, which need no index."""

    level: str
    lengths_N: Tensor
    """Trained tokens of each unit, as integers."""
    index_BT: Tensor | None

    def mean_N(self, values_BT: Tensor) -> Tensor:
        """Mean over the trained tokens of each unit (masked entries are 0); 0 for units without any."""
        divisor_N = self.lengths_N.clamp(min=1).to(values_BT.dtype)
        if self.level == "token":
            return values_BT
        if self.index_BT is None:
            return values_BT.sum(-1) / divisor_N
        zeros_N = values_BT.new_zeros(self.lengths_N.shape)
        return zeros_N.index_add(0, self.index_BT.flatten(), values_BT.flatten()) / divisor_N

    def spread_BT(self, values_N: Tensor) -> Tensor:
        """Give each token the value of its unit (broadcastable to B x T)."""
        if self.level == "token":
            return values_N
        return values_N.unsqueeze(-1) if self.index_BT is None else values_N[self.index_BT]

    @property
    def active_N(self) -> Tensor:
        return self.lengths_N > 0


def make_pool(config: ObjectiveConfig, inputs: Inputs) -> Pool:
    """The units that `ratio` names."""
    if config.ratio == "sequence":
        return Pool("sequence", inputs.num_actions_B, None)
    if config.ratio == "token":
        return Pool("token", inputs.mask_BT.to(torch.int64), None)
    index_BT = _turn_index(inputs.mask_BT, inputs.turn_ids_BT)
    num_units = int(index_BT.max()) + 1 if index_BT.numel() else 0
    trained = inputs.mask_BT.to(torch.int64).flatten()
    lengths_N = trained.new_zeros(num_units).index_add(0, index_BT.flatten(), trained)
    return Pool("turn", lengths_N, index_BT)


def _turn_index(mask_BT: Tensor, turn_ids_BT: Tensor | None) -> Tensor:
    """A number for each turn of each row; without turn ids a turn is a contiguous run of trained tokens."""
    num_rows, num_tokens = mask_BT.shape
    if turn_ids_BT is None:
        starts_BT = mask_BT.clone()
        starts_BT[:, 1:] &= ~mask_BT[:, :-1]
        turn_ids_BT = starts_BT.to(torch.int64).cumsum(-1)
    rows_BT = torch.arange(num_rows, device=mask_BT.device).unsqueeze(-1).expand(num_rows, num_tokens)
    if not mask_BT.numel():
        return rows_BT
    smallest = turn_ids_BT.min()
    keys_BT = rows_BT * (turn_ids_BT.max() - smallest + 1) + (turn_ids_BT - smallest)
    index_BT: Tensor = torch.unique(keys_BT, return_inverse=True)[1]
    return index_BT


def token_log_ratio(config: ObjectiveConfig, inputs: Inputs, pool: Pool, log_ratio_N: Tensor) -> Tensor:
    """The log ratio used to train each token: the value is its unit's, the gradient follows `gradient`."""
    if config.ratio == "token" or config.gradient == "shared":
        return pool.spread_BT(log_ratio_N).expand(inputs.mask_BT.shape)
    # The order matters: the difference is exactly 0, so a large log-prob does not round the log ratio away.
    path_BT = inputs.policy_BT - inputs.policy_BT.detach()
    return path_BT + pool.spread_BT(log_ratio_N.detach())
