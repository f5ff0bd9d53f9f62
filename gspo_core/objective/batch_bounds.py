"""What a whole batch says about its tokens: bounds that no sequence can know by itself.

One rule: all bounds follow from the log ratios of proximal policy to sampler as they are when the batch enters the
trainer, so that neither micro-batches nor ranks nor the updates of the step change them. It withholds nothing
(`gspo_core.objective.weights` does).

A *drift* holds the log ratio of each trained token of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_core.objective_config import ObjectiveConfig

# What a widened gate lets pass must still pass when its log-probs are computed in another layout.
ROUNDING = 1e-3


@dataclass(frozen=True)
class BatchBounds:
    """Beyond what a sequence or a token is withheld; null or infinite: nothing is."""

    k3_gate: float | None
    outlier_gate: float | None
    square: float = math.inf
    """For the square of a token's log ratio."""


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x, for x = log(policy / sampler): under the sampler its mean is the KL divergence."""
    return torch.expm1(log_ratio) - log_ratio


def looks_at_batch(config: ObjectiveConfig) -> bool:
    """Whether the bounds depend on the batch."""
    return config.min_kept_frac is not None or config.m2_bound is not None


def batch_bounds(config: ObjectiveConfig, drifts: Sequence[Tensor]) -> BatchBounds:
    """The bounds for a batch of these drifts; sequences without trained tokens do not count."""
    found = [drift_T for drift_T in drifts if len(drift_T)]
    k3_gate, outlier_gate = config.k3_gate, config.outlier_gate
    if config.min_kept_frac is not None and found:
        k3_gate, outlier_gate = _fed(config, config.min_kept_frac, found)
    square = math.inf
    if config.m2_bound is not None and found:
        square = second_moment_bound(torch.cat(found).square(), config.m2_bound)
    return BatchBounds(k3_gate, outlier_gate, square)


def _fed(config: ObjectiveConfig, least: float, drifts: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """The configured gates, or where they would starve the step, the narrowest k3 gate that does not."""
    distance_B = torch.stack([k3(drift_T.double()).mean() for drift_T in drifts])
    largest_B = torch.stack([drift_T.abs().max() for drift_T in drifts])
    highest = math.inf if config.k3_gate is None else config.k3_gate
    farthest = math.inf if config.outlier_gate is None else config.outlier_gate
    num_kept = int(((distance_B <= highest) & (largest_B <= farthest)).sum())
    num_wanted = math.ceil(least * len(drifts))
    if num_kept >= num_wanted:
        return config.k3_gate, config.outlier_gate
    nearest = float(distance_B.sort().values[num_wanted - 1])
    return max(nearest * (1 + ROUNDING), config.k3_gate or 0.0), None


def second_moment_bound(squares_N: Tensor, bound: float) -> float:
    """The largest square that may stay, so that the mean of those that stay is below `bound`; at least one stays.

    M2PO (2510.01161): the mean of the squared log ratios is the second moment that bounds the variance of the weights.
    """
    ordered_N = squares_N.double().sort().values
    counts_N = torch.arange(1, len(ordered_N) + 1, dtype=torch.float64, device=ordered_N.device)
    means_N = ordered_N.cumsum(0) / counts_N
    num_kept = max(1, int((means_N < bound).sum()))
    return float(ordered_N[num_kept - 1])


def effective_share(drifts: Sequence[Tensor]) -> float:
    """The effective sample size (sum w)^2 / sum w^2 of the sequences, as a share of their number; 1 without any.

    w is the product of a sequence's token ratios; as logarithms, because products of long sequences overflow.
    """
    log_weights = [drift_T.double().sum() for drift_T in drifts if len(drift_T)]
    if not log_weights:
        return 1.0
    log_weights_B = torch.stack(log_weights)
    log_size = 2 * torch.logsumexp(log_weights_B, 0) - torch.logsumexp(2 * log_weights_B, 0)
    return min(1.0, float(log_size.exp()) / len(log_weights))
