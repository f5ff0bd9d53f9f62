"""The statistics of a loss, as sums.

One rule: everything adds. Numerators and denominators are summed over micro-batches, updates and ranks and divided once
at the end (`gspo_core.objective.metrics`), never averaged twice. Only extremes reduce by maximum.

Shapes: B sequences, T tokens, N units of the ratio, staleness buckets in columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gspo_core.objective.batch_bounds import k3
from gspo_core.objective.inputs import Inputs
from gspo_core.objective.losses import LossContext, Terms
from gspo_core.objective.weights import Weights

# Highest staleness of each bucket; two more hold staler tokens and those of unknown staleness.
BUCKET_BOUNDS = (0, 1, 2, 4, 8, 16)
BUCKETS = ("0", "1", "2", "3_4", "5_8", "9_16", "17_up")
NUM_COLUMNS = len(BUCKETS) + 1

# Summed over trained tokens, in each token's own bucket.
TOKEN_SUMS = (
    "tokens",
    "tokens_positive",
    "tokens_negative",
    "clipped_positive",
    "clipped_negative",
    "capped",
    "k1_policy_behavior",
    "k3_policy_behavior",
    "k1_policy_proximal",
    "k3_policy_proximal",
    "k1_proximal_behavior",
    "k3_proximal_behavior",
    "weight",
    "weight_squared",
    "weight_bounded",
    "weight_raw",
    "weight_raw_squared",
    "kept_tokens",
    "kept_off_policy",
    "kept_staleness",
    "kept_correction",
    "kept_m2",
    "kl_reference",
    "staleness",
)
# Summed over sequences with trained tokens, in the bucket of their oldest token.
SEQUENCE_SUMS = (
    "sequences",
    "sequences_positive",
    "sequences_negative",
    "sequences_clipped",
    "sequences_clipped_positive",
    "sequences_clipped_negative",
    "log_ratio",
    "log_ratio_squared",
    "kept_sequences",
    "kept_k3",
    "kept_outlier",
    "kept_geometric",
    "sequence_weight",
    "sequence_weight_squared",
)
SCALAR_SUMS = (
    *("loss_policy", "loss_kl", "empty", "units", "ratio", "units_clamped", "kl_clamped"),
    *("with_reference", "with_staleness"),
)
# Extremes; a minimum is stored as the maximum of its negative.
SEQUENCE_MAXIMA = ("log_ratio_max", "log_ratio_negative_min")
SCALAR_MAXIMA = ("unit_log_ratio_max", "unit_log_ratio_negative_min", "staleness_max")

_ROWS = {name: row for row, name in enumerate((*TOKEN_SUMS, *SEQUENCE_SUMS))}
_SCALARS = {name: len(_ROWS) * NUM_COLUMNS + position for position, name in enumerate(SCALAR_SUMS)}
NUM_SUMS = len(_ROWS) * NUM_COLUMNS + len(SCALAR_SUMS)
_MAXIMA_ROWS = {name: row for row, name in enumerate(SEQUENCE_MAXIMA)}
_MAXIMA_SCALARS = {name: len(_MAXIMA_ROWS) * NUM_COLUMNS + position for position, name in enumerate(SCALAR_MAXIMA)}
NUM_MAXIMA = len(_MAXIMA_ROWS) * NUM_COLUMNS + len(SCALAR_MAXIMA)

# Beyond it, exp is just a huge number in a diagnostic; the bound does not apply to the loss.
LARGEST_EXPONENT = 20.0


@dataclass(frozen=True, eq=False)
class LossStats:
    """Two float64 vectors of fixed length. Reduce `sums` over ranks with SUM and `maxima` with MAX."""

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> Self:
        """The statistics of zero rows."""
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device)
        return cls(sums, torch.full((NUM_MAXIMA,), -torch.inf, dtype=torch.float64, device=device))

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def cpu(self) -> LossStats:
        return LossStats(self.sums.cpu(), self.maxima.cpu())

    def total(self, name: str) -> float:
        """A sum over all buckets."""
        if name in _SCALARS:
            return float(self.sums[_SCALARS[name]])
        return float(self._row(name).sum())

    def bucket(self, name: str, bucket: str) -> float:
        """One staleness bucket's part of a sum."""
        return float(self._row(name)[BUCKETS.index(bucket)])

    def maximum(self, name: str, bucket: str | None = None) -> float:
        """An extreme; -inf without data."""
        if name in _MAXIMA_SCALARS:
            return float(self.maxima[_MAXIMA_SCALARS[name]])
        start = _MAXIMA_ROWS[name] * NUM_COLUMNS
        row = self.maxima[start : start + NUM_COLUMNS]
        return float(row.max() if bucket is None else row[BUCKETS.index(bucket)])

    def _row(self, name: str) -> Tensor:
        start = _ROWS[name] * NUM_COLUMNS
        return self.sums[start : start + NUM_COLUMNS]


@torch.no_grad()
def collect(context: LossContext, weights: Weights, terms: Terms, losses: tuple[Tensor, Tensor]) -> LossStats:
    """The statistics of one micro-batch; `losses` are its policy and KL parts."""
    inputs = context.inputs
    log_ratio_B = _sequence_log_ratio(context)
    device = inputs.policy_BT.device
    buckets_BT = _bucket(inputs.staleness_BT, inputs.mask_BT)
    token_rows = _token_sums(inputs, weights, terms)
    table = torch.zeros(len(_ROWS), NUM_COLUMNS, dtype=torch.float64, device=device)
    table[: len(TOKEN_SUMS)].index_add_(1, buckets_BT.flatten(), token_rows)
    sequence_rows = _sequence_sums(inputs, weights, terms, log_ratio_B)
    oldest_B = None if inputs.staleness_BT is None else _oldest(inputs.staleness_BT)
    buckets_B = _bucket(oldest_B, inputs.num_actions_B > 0)
    table[len(TOKEN_SUMS) :].index_add_(1, buckets_B, sequence_rows)
    sums = torch.cat([table.flatten(), _scalar_sums(context, terms, losses)])
    return LossStats(sums, _maxima(context, terms, log_ratio_B, buckets_B))


def _oldest(staleness_BT: Tensor) -> Tensor:
    return staleness_BT.amax(-1) if staleness_BT.shape[-1] else staleness_BT.sum(-1)


def _bucket(staleness: Tensor | None, counted: Tensor) -> Tensor:
    if staleness is None:
        return torch.full(counted.shape, NUM_COLUMNS - 1, dtype=torch.int64, device=counted.device)
    bounds = torch.tensor(BUCKET_BOUNDS, device=staleness.device)
    return torch.bucketize(staleness, bounds)


def _token_sums(inputs: Inputs, weights: Weights, terms: Terms) -> Tensor:
    mask_BT, advantages_BT = inputs.mask_BT, inputs.advantages_BT
    policy_BT = inputs.policy_BT.detach().double()
    proximal_BT, behavior_BT = inputs.proximal_BT.double(), inputs.behavior_BT.double()
    positive_BT, negative_BT = advantages_BT > 0, advantages_BT < 0
    weight_BT = weights.weights_BT.double()
    mismatch_BT = proximal_BT - behavior_BT
    raw_BT = torch.where(mask_BT, _bounded_exp(mismatch_BT), 0.0)
    reference_BT = policy_BT if inputs.reference_BT is None else inputs.reference_BT.double()
    nothing_BT = torch.zeros_like(policy_BT)
    rows = [
        *(mask_BT, positive_BT, negative_BT),
        *(terms.clipped_BT & positive_BT, terms.clipped_BT & negative_BT, terms.capped_BT),
        *_divergences(policy_BT - behavior_BT),
        *_divergences(policy_BT - proximal_BT),
        *_divergences(mismatch_BT),
        *(weight_BT, weight_BT.square(), weights.bounded_BT, raw_BT, raw_BT.square()),
        weights.kept_BT,
        *(weights.gates.get(name, mask_BT) & mask_BT for name in ("off_policy", "staleness", "correction", "m2")),
        _divergences(reference_BT - policy_BT)[1],
        nothing_BT if inputs.staleness_BT is None else inputs.staleness_BT,
    ]
    table = torch.empty(len(rows), *mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    for position, row_BT in enumerate(rows):
        table[position].copy_(row_BT)
    return table.flatten(1)


def _bounded_exp(values: Tensor) -> Tensor:
    return values.clamp(max=LARGEST_EXPONENT).exp()


def _divergences(log_ratio_BT: Tensor) -> tuple[Tensor, Tensor]:
    """k1 and k3 of each token; 0 where the log ratio is 0, hence at masked positions."""
    return -log_ratio_BT, k3(log_ratio_BT.clamp(max=LARGEST_EXPONENT))


def _sequence_sums(inputs: Inputs, weights: Weights, terms: Terms, log_ratio_B: Tensor) -> Tensor:
    active_B = inputs.num_actions_B > 0
    positive_BT, negative_BT = inputs.advantages_BT > 0, inputs.advantages_BT < 0
    weight_B = inputs.sequence_mean_BT(weights.weights_BT).squeeze(-1).double()
    rows = [
        *(active_B, positive_BT.any(-1), negative_BT.any(-1), terms.clipped_BT.any(-1)),
        *((terms.clipped_BT & sign_BT).any(-1) for sign_BT in (positive_BT, negative_BT)),
        *(log_ratio_B, log_ratio_B.square()),
        weights.kept_BT.any(-1),
        *(weights.gates.get(name, active_B) & active_B for name in ("k3", "outlier", "geometric")),
        *(weight_B, weight_B.square()),
    ]
    return torch.stack([row.double() for row in rows])


def _sequence_log_ratio(context: LossContext) -> Tensor:
    """Mean log ratio to the anchor over the trained tokens of each sequence, whatever the unit of the ratio."""
    sums_B = context.delta_BT.double().sum(-1)
    return sums_B / context.inputs.num_actions_B.clamp(min=1)


def _scalar_sums(context: LossContext, terms: Terms, losses: tuple[Tensor, Tensor]) -> Tensor:
    inputs, clamp = context.inputs, context.config.log_ratio_clamp
    active_N = context.pool.active_N
    log_ratio_N = terms.log_ratio_N.double()
    highest = LARGEST_EXPONENT if clamp is None else clamp
    clamped_N = active_N & (log_ratio_N > highest)
    ratio_N = torch.where(active_N, log_ratio_N.clamp(max=highest).exp(), 0.0)
    empty_B = (inputs.num_actions_B == 0) & (inputs.sequence_weights_B > 0)
    tokens = inputs.num_actions_B.sum()
    zero = torch.zeros_like(tokens)
    scalars = [
        *(*losses, empty_B.sum(), active_N.sum(), ratio_N.sum(), clamped_N.sum()),
        zero if context.kl_clamp is None else (inputs.mask_BT & (context.delta_BT > context.kl_clamp)).sum(),
        zero if inputs.reference_BT is None else tokens,
        zero if inputs.staleness_BT is None else tokens,
    ]
    return torch.stack([scalar.double() for scalar in scalars])


def _maxima(context: LossContext, terms: Terms, log_ratio_B: Tensor, buckets_B: Tensor) -> Tensor:
    inputs = context.inputs
    active_B, active_N = inputs.num_actions_B > 0, context.pool.active_N
    lowest = torch.full((len(SEQUENCE_MAXIMA), NUM_COLUMNS), -torch.inf, dtype=torch.float64, device=active_B.device)
    seen = torch.where(active_B, torch.stack([log_ratio_B, -log_ratio_B]), -torch.inf)
    table = lowest.scatter_reduce(1, buckets_B.expand_as(seen), seen, reduce="amax")
    log_ratio_N = terms.log_ratio_N.double()
    extremes = [_maximum(log_ratio_N, active_N), _maximum(-log_ratio_N, active_N)]
    staleness_BT = inputs.staleness_BT
    known_BT = inputs.mask_BT if staleness_BT is not None else torch.zeros_like(inputs.mask_BT)
    extremes.append(_maximum(inputs.mask_BT if staleness_BT is None else staleness_BT, known_BT))
    return torch.cat([table.flatten(), torch.stack(extremes)])


def _maximum(values: Tensor, where: Tensor) -> Tensor:
    """The maximum where `where` holds; -inf if it holds nowhere or the tensor is empty."""
    seen = torch.where(where, values.double(), -torch.inf).flatten()
    return torch.cat([seen, seen.new_full((1,), -torch.inf)]).max()
