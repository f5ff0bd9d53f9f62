"""The losses, one function each: from log ratios and advantages to a loss per token.

One rule: every function returns each token's loss before aggregation, correction and gates, and where it was clipped;
both are defined for every trained token, gated or not. Equations: `docs/objective.md`.

Shapes: B sequences, T tokens, N units of the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_core.objective.batch_bounds import k3
from gspo_core.objective.inputs import Inputs
from gspo_core.objective.pooling import Pool, token_log_ratio
from gspo_core.objective_config import Band, ObjectiveConfig

# VESPO's own bounds on a token's log ratio and on the log of the product of ratios.
VESPO_TOKEN_BOUND = 20.0
VESPO_PRODUCT_BOUNDS = (-18.420680743952367, 20.0)  # log(1e-8), 20
# A ratio exactly at its bound passes its gradient; rounding must not change that.
BOUND_SLACK = {torch.float32: 5e-8, torch.float64: 1e-12}
# Keeps the logarithm of the probability of all other tokens finite.
DPPO_EPS = 1e-8


@dataclass(frozen=True)
class Terms:
    """The result of a loss function. Entries where `live_BT` is False carry no gradient and any finite value."""

    loss_BT: Tensor
    clipped_BT: Tensor
    capped_BT: Tensor
    """Where the dual clip acted."""
    log_ratio_N: Tensor
    """Log ratio of each unit, before the clamp and without gradient."""


@dataclass(frozen=True)
class LossContext:
    """The inputs of a loss function. `live_BT`: trained, kept, advantage not 0; elsewhere no gradient flows."""

    config: ObjectiveConfig
    inputs: Inputs
    pool: Pool
    live_BT: Tensor

    @property
    def anchor_BT(self) -> Tensor:
        return self.inputs.behavior_BT if self.config.anchor == "behavior" else self.inputs.proximal_BT

    @property
    def delta_BT(self) -> Tensor:
        """Log ratio of each token to the anchor, with gradient."""
        return self.inputs.policy_BT - self.anchor_BT

    def ratio_BT(self, log_ratio_BT: Tensor, where_BT: Tensor) -> Tensor:
        """exp of the clamped log ratio at `where_BT`; elsewhere 1 without gradient, to avoid overflow."""
        log_ratio_BT = torch.where(where_BT, log_ratio_BT, 0.0)
        highest = self.config.log_ratio_clamp
        return (log_ratio_BT if highest is None else log_ratio_BT.clamp(max=highest)).exp()

    def kl_ratio_BT(self) -> Tensor:
        """exp of the log ratio of each token, bounded only where that of the loss is."""
        delta_BT = torch.where(self.inputs.mask_BT, self.delta_BT, 0.0)
        highest = self.kl_clamp
        return (delta_BT if highest is None else delta_BT.clamp(max=highest)).exp()

    @property
    def kl_clamp(self) -> float | None:
        return self.config.log_ratio_clamp if self.config.bounds_ratio else None


def clip_loss(context: LossContext) -> Terms:
    """PPO's pessimistic clip on a sequence ratio (GSPO), a turn ratio or a token ratio (GRPO, PPO)."""
    config, inputs, pool = context.config, context.inputs, context.pool
    advantages_BT = inputs.advantages_BT
    log_ratio_N = pool.mean_N(context.delta_BT)
    low_BT, high_BT = _clip_widths(config, pool, inputs)
    positive_BT, negative_BT = advantages_BT > 0, advantages_BT < 0
    # In logarithms: float32 resolves a log ratio of 4e-4 to 1e-11, but a ratio of 1.0004 only to 1e-7.
    decision_BT = pool.spread_BT(_decision(context, log_ratio_N.detach()))
    slack = BOUND_SLACK[decision_BT.dtype]
    too_high_BT = positive_BT & (decision_BT > torch.log1p(high_BT) + slack)
    clipped_BT = too_high_BT | (negative_BT & (decision_BT < torch.log1p(-low_BT) - slack))
    bound_BT = torch.where(positive_BT, 1 + high_BT, 1 - low_BT)
    capped_BT = torch.zeros_like(clipped_BT)
    log_ratio_BT = token_log_ratio(config, inputs, pool, log_ratio_N)
    if config.dual_clip is not None:
        ratio_BT = context.ratio_BT(log_ratio_BT.detach(), inputs.mask_BT)
        capped_BT = negative_BT & ~clipped_BT & (ratio_BT > config.dual_clip)
        bound_BT = torch.where(capped_BT, config.dual_clip, bound_BT)
    constant_BT = clipped_BT | capped_BT
    ratio_BT = context.ratio_BT(log_ratio_BT, context.live_BT & ~constant_BT)
    loss_BT = -torch.where(constant_BT, bound_BT, ratio_BT) * advantages_BT
    return Terms(loss_BT, clipped_BT, capped_BT, log_ratio_N.detach())


def _decision(context: LossContext, log_ratio_N: Tensor) -> Tensor:
    """The log ratio that decides clipping: against the sampler, log s has mean -KL, log s + mean k3 has mean 0."""
    if not context.config.compensates:
        return log_ratio_N
    return log_ratio_N + context.pool.mean_N(k3(context.delta_BT.detach()))


def _clip_widths(config: ObjectiveConfig, pool: Pool, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """How far below and above 1 the ratio of each token's unit may go."""
    if config.band is None:
        new_full = inputs.advantages_BT.new_full
        low_BT, high_BT = new_full((), config.clip_low), new_full((), config.clip_high)
    else:
        low_BT = high_BT = pool.spread_BT(band_width(config.band, pool.lengths_N, inputs.policy_BT.dtype))
    if config.stale_clip is None:
        return low_BT, high_BT
    left_BT = pool.spread_BT(stale_share(pool.mean_N(inputs.proximal_BT - inputs.behavior_BT), config.stale_clip))
    return low_BT * left_BT, high_BT * left_BT


def stale_share(drift_N: Tensor, bound: float) -> Tensor:
    """The share of a clip's width that is left for units whose log ratio to the sampler is `drift_N`.

    As in SAT (2607.18722): all of it within the bound, less beyond it, so the interval lies within the nominal one and
    the loss is nowhere below PPO's. The form of the fall, half a Gaussian, is ours.
    """
    beyond_N = (drift_N.abs() / bound - 1).clamp(min=0)
    return (-beyond_N.square() / 2).exp()


def band_width(band: Band, lengths_N: Tensor, dtype: torch.dtype) -> Tensor:
    """The clip width of units with `lengths_N` trained tokens."""
    lengths_N = lengths_N.clamp(min=1).to(dtype)
    return (band.z * torch.sqrt(2 * band.kappa / lengths_N)).clamp(band.min, band.max)


def sapo_loss(context: LossContext) -> Terms:
    """A smooth gate in place of the clip: (4 / tau) sigmoid(tau (r - 1)), tau by the sign of the advantage."""
    config, inputs, pool = context.config, context.inputs, context.pool
    log_ratio_N = pool.mean_N(context.delta_BT)
    ratio_BT = context.ratio_BT(token_log_ratio(config, inputs, pool, log_ratio_N), context.live_BT)
    positive_BT = (inputs.advantages_BT > 0).to(ratio_BT.dtype)
    tau_BT = positive_BT * config.sapo_tau_positive + (1 - positive_BT) * config.sapo_tau_negative
    loss_BT = -(4 / tau_BT) * torch.sigmoid(tau_BT * (ratio_BT - 1)) * inputs.advantages_BT
    nowhere_BT = torch.zeros_like(inputs.mask_BT)
    return Terms(loss_BT, nowhere_BT, nowhere_BT, log_ratio_N.detach())


def gmpo_loss(context: LossContext) -> Terms:
    """The geometric mean of token ratios, each clipped in log space before it enters the mean."""
    config, inputs, pool = context.config, context.inputs, context.pool
    bound = config.gmpo_clip
    delta_BT = context.delta_BT
    positive_BT, negative_BT = inputs.advantages_BT > 0, inputs.advantages_BT < 0
    detached_BT = delta_BT.detach()
    clipped_BT = (positive_BT & (detached_BT > bound)) | (negative_BT & (detached_BT < -bound))
    bounded_BT = torch.where(clipped_BT, detached_BT.clamp(-bound, bound), delta_BT)
    log_mean_BT = pool.spread_BT(pool.mean_N(bounded_BT)).expand(inputs.mask_BT.shape)
    loss_BT = -context.ratio_BT(log_mean_BT, context.live_BT) * inputs.advantages_BT
    return Terms(loss_BT, clipped_BT, torch.zeros_like(clipped_BT), pool.mean_N(detached_BT))


def cispo_loss(context: LossContext) -> Terms:
    """REINFORCE weighted by the bounded token ratio, which passes no gradient."""
    config, inputs = context.config, context.inputs
    detached_BT = context.delta_BT.detach()
    ratio_BT = detached_BT.exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    clipped_BT = inputs.mask_BT & (inputs.advantages_BT != 0) & ((ratio_BT > high) | (ratio_BT < low))
    loss_BT = -ratio_BT.clamp(low, high) * inputs.advantages_BT * _live_policy(context)
    return Terms(loss_BT, clipped_BT, torch.zeros_like(clipped_BT), detached_BT)


def dppo_loss(context: LossContext) -> Terms:
    """REINFORCE weighted by the token ratio, unless the probability has moved too far where the advantage points."""
    config, inputs = context.config, context.inputs
    assert config.dppo_delta is not None
    detached_BT = context.delta_BT.detach()
    now_BT, then_BT = inputs.policy_BT.detach().exp(), context.anchor_BT.exp()
    if config.loss == "dppo_tv":
        too_far_BT = (now_BT - then_BT).abs() > config.dppo_delta
    else:
        others_BT = torch.log((1 - then_BT + DPPO_EPS) / (1 - now_BT + DPPO_EPS))
        too_far_BT = then_BT * -detached_BT + (1 - then_BT) * others_BT > config.dppo_delta
    moved_up_BT = torch.where(inputs.advantages_BT > 0, now_BT > then_BT, now_BT < then_BT)
    clipped_BT = inputs.mask_BT & (inputs.advantages_BT != 0) & too_far_BT & moved_up_BT
    weight_BT = torch.where(clipped_BT, 0.0, detached_BT.clamp(max=math.log(config.dppo_cap)).exp())
    loss_BT = -weight_BT * inputs.advantages_BT * _live_policy(context)
    return Terms(loss_BT, clipped_BT, torch.zeros_like(clipped_BT), detached_BT)


def vespo_loss(context: LossContext) -> Terms:
    """REINFORCE weighted by phi(W) = W^k exp(lambda (1 - W)) of the product W of token ratios."""
    config, inputs, pool = context.config, context.inputs, context.pool
    detached_BT = context.delta_BT.detach()
    bounded_BT = detached_BT.clamp(-VESPO_TOKEN_BOUND, VESPO_TOKEN_BOUND)
    log_product_BT = bounded_BT.sum(-1, keepdim=True).clamp(*VESPO_PRODUCT_BOUNDS)
    (k_up, lambda_up), (k_down, lambda_down) = config.vespo_positive, config.vespo_negative
    up_BT = lambda_up + k_up * log_product_BT - lambda_up * log_product_BT.exp()
    down_BT = lambda_down + k_down * log_product_BT - lambda_down * log_product_BT.exp()
    weight_BT = torch.where(inputs.advantages_BT >= 0, up_BT, down_BT).exp()
    nowhere_BT = torch.zeros_like(inputs.mask_BT)
    loss_BT = -weight_BT * inputs.advantages_BT * _live_policy(context)
    return Terms(loss_BT, nowhere_BT, nowhere_BT, pool.mean_N(detached_BT))


def _live_policy(context: LossContext) -> Tensor:
    return torch.where(context.live_BT, context.inputs.policy_BT, 0.0)


LOSSES: Mapping[str, Callable[[LossContext], Terms]] = {
    "clip": clip_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "dppo_tv": dppo_loss,
    "dppo_kl": dppo_loss,
    "vespo": vespo_loss,
}
