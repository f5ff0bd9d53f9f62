"""The objective as one function.

One rule: the caller passes the two denominators of the whole update - all micro-batches, all ranks, before any gate;
micro-batches are summed, never averaged. It runs no model and takes no step.

Shapes: B sequences (an episode, or one branch of it), T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo_core.objective.batch_bounds import BatchBounds, k3
from gspo_core.objective.checks import require
from gspo_core.objective.inputs import Inputs, ObjectiveError, Values, prepare
from gspo_core.objective.losses import LOSSES, LossContext, Terms
from gspo_core.objective.pooling import make_pool
from gspo_core.objective.stats import LossStats, collect
from gspo_core.objective.weights import Weights, make_weights
from gspo_core.objective_config import ObjectiveConfig


@dataclass(frozen=True, eq=False)
class TokenTerms:
    """What a loss is made of, token by token; nothing here carries a gradient. 0 or False where nothing is trained."""

    mask_BT: Tensor
    advantages_BT: Tensor
    log_ratio_BT: Tensor
    """For the unit (sequence, turn or token) that the token belongs to, against the anchor."""
    weight_BT: Tensor
    """The correction for the sampler's distribution."""
    kept_BT: Tensor
    """Passed every gate."""
    gates: Mapping[str, Tensor]
    """What each gate keeps, by token."""
    clipped_BT: Tensor
    policy_BT: Tensor
    """Share of the loss that the objective has; all together are the loss."""
    kl_BT: Tensor
    """Share of the loss that the pull to the reference has."""


def policy_loss(
    config: ObjectiveConfig,
    policy_logprobs_BT: Tensor,
    action_mask_BT: Values,
    advantages: Values,
    proximal_logprobs_BT: Values | None = None,
    behavior_logprobs_BT: Values | None = None,
    reference_logprobs_BT: Values | None = None,
    turn_ids_BT: Values | None = None,
    staleness_BT: Values | None = None,
    sequence_weights_B: Values | None = None,
    num_sequences: float | Tensor | None = None,
    num_tokens: float | Tensor | None = None,
    bounds: BatchBounds | None = None,
    tell: Callable[[TokenTerms], None] | None = None,
) -> tuple[Tensor, LossStats]:
    """The loss (to minimise) of some of an update's sequences, and its statistics.

    Log-probs are those of the tokens at their sampling temperature, in float32 or float64. `advantages` is (B,) or
    (B, T). By default, the proximal policy is the policy itself without gradient (the first update of a batch), the
    sampler is the proximal policy, and a turn is a contiguous run of trained tokens. `sequence_weights_B` holds each
    row's share of its episode, so that the branches of an episode count as one; rows with weight 0 are padding and
    are ignored. `num_sequences` is the sum of these weights and `num_tokens` the number of trained tokens over the
    whole update (`loss_denominators`). Both default to those of the given rows, as do the `bounds` of a whole batch
    (`batch_bounds`). `tell` is given the terms of each token. `clip_spread` acts through `widened_clip` alone.
    """
    inputs = prepare(
        config,
        policy_logprobs_BT,
        action_mask_BT,
        advantages,
        proximal_logprobs_BT,
        behavior_logprobs_BT,
        reference_logprobs_BT,
        turn_ids_BT,
        staleness_BT,
        sequence_weights_B,
    )
    # Ratios near 1 do not survive half precision, so ignore the caller's autocast.
    with torch.autocast(policy_logprobs_BT.device.type, enabled=False):
        pool = make_pool(config, inputs)
        weights = make_weights(config, inputs, bounds)
        live_BT = weights.kept_BT & (inputs.advantages_BT != 0)
        context = LossContext(config, inputs, pool, live_BT)
        terms = LOSSES[config.loss](context)
        scale_BT = _scale(config, inputs, num_sequences, num_tokens)
        signal_BT = torch.where(live_BT, scale_BT * weights.weights_BT * terms.loss_BT, 0.0)
        policy_part = signal_BT.sum()
        kl_BT = scale_BT * _kl_to_reference(context) if config.kl_coef else torch.zeros_like(signal_BT)
        kl_part = kl_BT.sum()
        stats = collect(context, weights, terms, (policy_part.detach(), kl_part.detach()))
        if tell is not None:
            tell(_token_terms(context, weights, terms, signal_BT, kl_BT))
    return policy_part + kl_part, stats


@torch.no_grad()
def _token_terms(context: LossContext, weights: Weights, terms: Terms, signal_BT: Tensor, kl_BT: Tensor) -> TokenTerms:
    inputs, shape = context.inputs, context.inputs.mask_BT.shape
    spread_BT = context.pool.spread_BT(terms.log_ratio_N).expand(shape)
    gates = {name: kept if kept.ndim == 2 else kept.unsqueeze(-1).expand(shape) for name, kept in weights.gates.items()}
    return TokenTerms(
        mask_BT=inputs.mask_BT,
        advantages_BT=inputs.advantages_BT,
        log_ratio_BT=torch.where(inputs.mask_BT, spread_BT, 0.0),
        weight_BT=weights.weights_BT,
        kept_BT=weights.kept_BT,
        gates=gates,
        clipped_BT=terms.clipped_BT,
        policy_BT=signal_BT.detach(),
        kl_BT=kl_BT.detach(),
    )


def _scale(
    config: ObjectiveConfig, inputs: Inputs, num_sequences: float | Tensor | None, num_tokens: float | Tensor | None
) -> Tensor:
    """The weight of each token in the mean that `aggregate` names; 0 at masked positions.

    Cutting an episode into branches does not change the weight of its tokens: `sequence` divides by the tokens of a
    branch and multiplies by the branch's share, the other two never divide by a length.
    """
    weights_B = inputs.sequence_weights_B
    if config.aggregate == "token":
        local = inputs.num_actions_B.sum().to(weights_B.dtype)
        scale_BT = 1 / _denominator("num_tokens", num_tokens, local)
    else:
        divisor = _denominator("num_sequences", num_sequences, weights_B.sum())
        scale_BT = (
            (weights_B / divisor).unsqueeze(-1) / inputs.lengths_BT if config.aggregate == "sequence" else 1 / divisor
        )
    return torch.where(inputs.mask_BT, scale_BT, 0.0)


def _denominator(name: str, given: float | Tensor | None, local: Tensor) -> Tensor:
    if given is None:
        return torch.where(local > 0, local, 1.0)
    divisor = torch.as_tensor(given, dtype=local.dtype, device=local.device)
    if isinstance(given, Tensor):
        require(torch.isfinite(divisor) & (divisor > 0), lambda: _no_count(name, given))
    elif not 0 < given < math.inf:  # known here: nothing to wait for
        raise _no_count(name, given)
    return divisor


def _no_count(name: str, given: float | Tensor) -> ObjectiveError:
    return ObjectiveError(f"{name} counts the whole update and is positive, not {given}")


def _kl_to_reference(context: LossContext) -> Tensor:
    """kl_coef times k3 of reference against policy; gates do not apply, since they judge only the sampler's data."""
    config, inputs = context.config, context.inputs
    assert inputs.reference_BT is not None
    kl_BT = k3(inputs.reference_BT - inputs.policy_BT)
    if config.kl_unbiased:
        kl_BT = kl_BT * context.kl_ratio_BT()
    return config.kl_coef * kl_BT


def loss_denominators(
    action_masks: Sequence[Values] | Tensor | NDArray[np.number | np.bool_],
    sequence_weights: Sequence[float] | None = None,
) -> tuple[float, float]:
    """`num_sequences` and `num_tokens` of an update, from the action masks of all its sequences.

    Weights count sequences, not tokens; the tokens of a row with weight 0 (padding) do not count.
    """
    if sequence_weights is None:
        sequence_weights = [1.0] * len(action_masks)
    pairs = list(zip(action_masks, sequence_weights, strict=True))
    num_tokens = sum(int(torch.as_tensor(mask).count_nonzero()) for mask, weight in pairs if weight)
    return float(sum(weight for _, weight in pairs)), float(num_tokens)
