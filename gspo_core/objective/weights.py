"""Correction weights and gates: how much each token's signal counts.

One rule: a gate or mask sets a weight to 0 and changes nothing else - no length, no ratio, no denominator. Nothing here
carries a gradient.

Shapes: B sequences, T tokens. `drift` is the log-prob under the anchor's side minus the one recorded when sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gspo_core.objective.batch_bounds import BatchBounds, batch_bounds, k3, looks_at_batch
from gspo_core.objective.inputs import Inputs, ObjectiveError
from gspo_core.objective_config import ObjectiveConfig


@dataclass(frozen=True)
class Weights:
    """`weights_BT` is the correction, 0 at masked positions; it applies to the loss where `kept_BT` is True."""

    weights_BT: Tensor
    bounded_BT: Tensor
    """True where a bound limited the correction."""
    kept_BT: Tensor
    """Trained tokens that passed all gates and the correction mask."""
    gates: dict[str, Tensor] = field(default_factory=dict)
    """What each gate keeps: (B,) for sequence gates, (B, T) for token gates."""


@torch.no_grad()
def make_weights(config: ObjectiveConfig, inputs: Inputs, bounds: BatchBounds | None = None) -> Weights:
    """Correction and gates of every trained token. `bounds` are those of the batch, by default of the given rows."""
    policy_BT = inputs.policy_BT.detach()
    mismatch_BT = inputs.proximal_BT - inputs.behavior_BT
    weights_BT, bounded_BT, survives_BT = _correction(config, inputs, mismatch_BT)
    drift_BT = policy_BT - inputs.behavior_BT if config.anchor == "behavior" else mismatch_BT
    if bounds is None:
        rows = zip(drift_BT, inputs.mask_BT, strict=True) if looks_at_batch(config) else ()
        bounds = batch_bounds(config, [row_T[mask_T] for row_T, mask_T in rows])
    gates = _sequence_gates(config, bounds, inputs, drift_BT)
    kept_BT = inputs.mask_BT
    for kept_B in gates.values():
        kept_BT = kept_BT & kept_B.unsqueeze(-1)
    gates |= _token_gates(config, inputs, policy_BT)
    if config.m2_bound is not None:
        gates["m2"] = drift_BT.double().square() <= bounds.square
    if config.correction.endswith("_mask"):
        gates["correction"] = survives_BT
    for gate_BT in gates.values():
        if gate_BT.ndim == 2:
            kept_BT = kept_BT & gate_BT
    return Weights(weights_BT, bounded_BT, kept_BT, gates)


def _sequence_gates(
    config: ObjectiveConfig, bounds: BatchBounds, inputs: Inputs, drift_BT: Tensor
) -> dict[str, Tensor]:
    gates = {}
    if bounds.k3_gate is not None:
        gates["k3"] = inputs.sequence_mean_BT(k3(drift_BT)).squeeze(-1) <= bounds.k3_gate
    if bounds.outlier_gate is not None:
        gates["outlier"] = (drift_BT.abs() <= bounds.outlier_gate).all(-1)
    if config.geometric_log_band is not None:
        low, high = config.geometric_log_band
        mean_B = inputs.sequence_mean_BT(drift_BT).squeeze(-1)
        gates["geometric"] = (low <= mean_B) & (mean_B <= high)
    return gates


def _token_gates(config: ObjectiveConfig, inputs: Inputs, policy_BT: Tensor) -> dict[str, Tensor]:
    gates = {}
    if config.off_policy_gate is not None:
        fell_BT = inputs.sequence_mean_BT(inputs.behavior_BT - policy_BT)
        gates["off_policy"] = (inputs.advantages_BT >= 0) | (fell_BT <= config.off_policy_gate)
    if config.staleness_cap is not None:
        assert inputs.staleness_BT is not None
        gates["staleness"] = inputs.staleness_BT <= config.staleness_cap
    return gates


def _correction(config: ObjectiveConfig, inputs: Inputs, mismatch_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight, where it is bounded, and where it passes its mask."""
    mask_BT = inputs.mask_BT
    if config.correction == "none":
        return mask_BT.to(mismatch_BT.dtype), torch.zeros_like(mask_BT), mask_BT
    level, action = config.correction.split("_")
    log_weight_BT = _log_weight(config, inputs, mismatch_BT, level)
    highest = math.log(config.correction_max)
    lowest = -math.inf if config.correction_min is None else math.log(config.correction_min)
    outside_BT = mask_BT & ((log_weight_BT > highest) | (log_weight_BT < lowest))
    # Bound before exp to avoid overflow.
    weights_BT = torch.where(mask_BT, log_weight_BT.clamp(lowest, highest).exp(), 0.0)
    if action == "truncate":
        return weights_BT, outside_BT, mask_BT
    return torch.where(outside_BT, 0.0, weights_BT), outside_BT, mask_BT & ~outside_BT


def faded_before(values_BT: Tensor, mask_BT: Tensor, kept: float) -> Tensor:
    """The sum of the values at trained tokens before each trained token, each ``kept`` times as large with every
    further trained token."""
    place_BT = torch.where(mask_BT, mask_BT.cumsum(-1) - 1, mask_BT.shape[-1])  # untrained tokens: after the rest
    shape = (mask_BT.shape[0], mask_BT.shape[-1] + 1)
    sums_BT = values_BT.new_zeros(shape).scatter(-1, place_BT, torch.where(mask_BT, values_BT, 0.0))[:, :-1]
    sums_BT = torch.nn.functional.pad(sums_BT, (1, 0))  # a zero before the first, and a last place for untrained tokens
    distance = 1
    while distance < sums_BT.shape[-1]:  # each pass doubles how far back a sum reaches
        sums_BT = sums_BT + kept**distance * torch.nn.functional.pad(sums_BT, (distance, 0))[:, :-distance]
        distance *= 2
    return torch.where(mask_BT, sums_BT.gather(-1, place_BT), 0.0)


def _log_weight(config: ObjectiveConfig, inputs: Inputs, mismatch_BT: Tensor, level: str) -> Tensor:
    if level == "token":
        if config.prefix_threshold is None:
            return mismatch_BT
        told_BT = torch.where(mismatch_BT.abs() > config.prefix_threshold, mismatch_BT, 0.0)
        return mismatch_BT + faded_before(told_BT, inputs.mask_BT, 1 - 1 / config.prefix_memory).clamp(max=0.0)
    if level == "geometric":
        return inputs.sequence_mean_BT(mismatch_BT).expand(mismatch_BT.shape)
    longest = int(inputs.num_actions_B.max()) if inputs.num_actions_B.numel() else 0
    if longest > config.product_max_tokens:
        raise ObjectiveError(
            f"correction: {config.correction} on a sequence of {longest} trained tokens: beyond product_max_tokens "
            f"({config.product_max_tokens}) almost all product weights vanish; use token or geometric"
        )
    return mismatch_BT.sum(-1, keepdim=True).expand(mismatch_BT.shape)
