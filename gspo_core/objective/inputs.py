"""Sanitizes the inputs of the loss before any arithmetic.

One rule: it replaces every value at a masked position - garbage, NaN, infinity - and refuses non-finite values at
trained positions as corrupt data. It contains no formulas.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo_core.objective.checks import require
from gspo_core.objective_config import ObjectiveConfig

# Accepted input types; only the policy's log-probs must be a tensor, because they carry a gradient.
Number: TypeAlias = float | Sequence[float]
Values: TypeAlias = Tensor | NDArray[np.number | np.bool_] | Sequence[Number]


class ObjectiveError(ValueError):
    """The inputs of the loss do not fit its configuration or each other."""


class NonFiniteInput(ObjectiveError):
    """A trained position holds NaN or infinity; refuse such a sequence before training."""


@dataclass(frozen=True)
class Inputs:
    """Masked inputs: every entry at a masked position is 0. Only `policy_BT` carries a gradient."""

    policy_BT: Tensor
    proximal_BT: Tensor
    behavior_BT: Tensor
    reference_BT: Tensor | None
    mask_BT: Tensor
    advantages_BT: Tensor
    turn_ids_BT: Tensor | None
    staleness_BT: Tensor | None
    sequence_weights_B: Tensor
    num_actions_B: Tensor
    """Trained tokens of each sequence, as integers."""

    @property
    def lengths_BT(self) -> Tensor:
        """Trained tokens of each sequence, at least 1: a divisor of shape (B, 1)."""
        return self.num_actions_B.clamp(min=1).to(self.policy_BT.dtype).unsqueeze(-1)

    def sequence_mean_BT(self, values_BT: Tensor) -> Tensor:
        """Mean over the trained tokens of each sequence, of shape (B, 1); 0 for sequences without any."""
        return values_BT.sum(-1, keepdim=True) / self.lengths_BT


def prepare(
    config: ObjectiveConfig,
    policy_logprobs_BT: Tensor,
    action_mask_BT: Values,
    advantages: Values,
    proximal_logprobs_BT: Values | None,
    behavior_logprobs_BT: Values | None,
    reference_logprobs_BT: Values | None,
    turn_ids_BT: Values | None,
    staleness_BT: Values | None,
    sequence_weights_B: Values | None,
) -> Inputs:
    """Check shapes, types and presence; zero masked positions and padding rows."""
    _check_presence(config, behavior_logprobs_BT, reference_logprobs_BT, staleness_BT)
    shape = _check_matrix(policy_logprobs_BT)
    weights_B = _weights(sequence_weights_B, policy_logprobs_BT)
    mask_BT = _same_shape("action_mask_BT", _tensor("action_mask_BT", action_mask_BT, policy_logprobs_BT), shape) != 0
    mask_BT = mask_BT & (weights_B > 0).unsqueeze(-1)

    def logprobs(name: str, given: Values | None) -> Tensor | None:
        if given is None:
            return None
        given_BT = _tensor(name, given, policy_logprobs_BT)
        _check_dtype(name, given_BT)
        given_BT = _same_shape(name, given_BT, shape).to(policy_logprobs_BT.dtype)
        return torch.where(mask_BT, given_BT if name == "policy_logprobs_BT" else given_BT.detach(), 0.0)

    policy_BT = logprobs("policy_logprobs_BT", policy_logprobs_BT)
    assert policy_BT is not None
    proximal_BT = logprobs("proximal_logprobs_BT", proximal_logprobs_BT)
    if proximal_BT is None:
        proximal_BT = policy_BT.detach()
    behavior_BT = logprobs("behavior_logprobs_BT", behavior_logprobs_BT)
    if behavior_BT is None:
        behavior_BT = proximal_BT
    reference_BT = logprobs("reference_logprobs_BT", reference_logprobs_BT)
    num_actions_B = mask_BT.sum(-1)
    advantages_BT = _advantages(config, _tensor("advantages", advantages, policy_BT), mask_BT, policy_BT.dtype)
    _check_finite(mask_BT, policy_BT, proximal_BT, behavior_BT, reference_BT, advantages_BT)
    return Inputs(
        policy_BT=policy_BT,
        proximal_BT=proximal_BT,
        behavior_BT=behavior_BT,
        reference_BT=reference_BT,
        mask_BT=mask_BT,
        advantages_BT=advantages_BT,
        turn_ids_BT=_integers("turn_ids_BT", turn_ids_BT, mask_BT),
        staleness_BT=_integers("staleness_BT", staleness_BT, mask_BT),
        sequence_weights_B=weights_B,
        num_actions_B=num_actions_B,
    )


def _check_presence(
    config: ObjectiveConfig, behavior_BT: Values | None, reference_BT: Values | None, staleness_BT: Values | None
) -> None:
    if config.anchor == "behavior" and behavior_BT is None:
        raise ObjectiveError("anchor: behavior compares with the sampler; give behavior_logprobs_BT")
    if config.kl_coef > 0 and reference_BT is None:
        raise ObjectiveError("kl_coef is set; give reference_logprobs_BT")
    if config.staleness_cap is not None and staleness_BT is None:
        raise ObjectiveError("staleness_cap is set; give staleness_BT")


def _tensor(name: str, given: Values, policy_BT: Tensor) -> Tensor:
    """Convert to a tensor on the policy's device. Floats in a list take the policy's dtype, not torch's default."""
    if isinstance(given, Tensor):
        return given
    try:
        array = np.asarray(given)
        dtype = policy_BT.dtype if array.dtype.kind == "f" and not isinstance(given, np.ndarray) else None
        return torch.tensor(array, dtype=dtype, device=policy_BT.device)
    except (TypeError, ValueError) as error:
        raise ObjectiveError(f"{name} is no tensor and cannot be made one: {error}") from None


def _check_matrix(policy_BT: Tensor) -> torch.Size:
    if not isinstance(policy_BT, Tensor):
        raise ObjectiveError(f"policy_logprobs_BT carries the gradient: a tensor, not {type(policy_BT).__name__}")
    if policy_BT.ndim != 2:
        raise ObjectiveError(f"policy_logprobs_BT has two dimensions, sequences and tokens, not {policy_BT.ndim}")
    return policy_BT.shape


def _check_dtype(name: str, given: Tensor) -> None:
    # Next to 1, bfloat16 is spaced by 1/128 and float16 by 1/1024: neither can tell a ratio of 1.0004 from 1.
    if given.dtype not in (torch.float32, torch.float64):
        raise ObjectiveError(
            f"{name} is {str(given.dtype).removeprefix('torch.')}; log-probs are float32 or float64, from a "
            "log-softmax that was taken in that precision"
        )


def _same_shape(name: str, given: Tensor, shape: torch.Size) -> Tensor:
    if given.shape != shape:
        raise ObjectiveError(f"{name} has shape {tuple(given.shape)}, policy_logprobs_BT has {tuple(shape)}")
    return given


def _advantages(config: ObjectiveConfig, given: Tensor, mask_BT: Tensor, dtype: torch.dtype) -> Tensor:
    if given.shape == mask_BT.shape[:1]:
        given = given.unsqueeze(-1).expand(mask_BT.shape)
    elif given.shape != mask_BT.shape:
        raise ObjectiveError(f"advantages have shape {tuple(given.shape)}, not (B,) or (B, T) = {tuple(mask_BT.shape)}")
    elif config.loss == "gmpo" and config.advantage_reduction != "mean":
        raise ObjectiveError("the loss gmpo needs one advantage per sequence: give (B,) or advantage_reduction: mean")
    given_BT = torch.where(mask_BT, given.detach().to(dtype), 0.0)
    if config.advantage_reduction == "mean":
        mean_BT = given_BT.sum(-1, keepdim=True) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        given_BT = torch.where(mask_BT, mean_BT, 0.0)
    return given_BT


def _integers(name: str, given: Values | None, mask_BT: Tensor) -> Tensor | None:
    if given is None:
        return None
    given_BT = _same_shape(name, _tensor(name, given, mask_BT), mask_BT.shape)
    if given_BT.is_floating_point():
        raise ObjectiveError(f"{name} holds whole numbers, not {str(given_BT.dtype).removeprefix('torch.')}")
    given_BT = torch.where(mask_BT, given_BT.to(torch.int64), 0)
    if name == "staleness_BT":
        require(
            (given_BT >= 0).all(),
            lambda: ObjectiveError("staleness_BT holds a negative staleness at a trained position"),
        )
    return given_BT


def _weights(given: Values | None, policy_BT: Tensor) -> Tensor:
    if given is None:
        return policy_BT.new_ones(policy_BT.shape[0])
    given_B = _tensor("sequence_weights_B", given, policy_BT)
    if given_B.shape != policy_BT.shape[:1]:
        raise ObjectiveError(f"sequence_weights_B has shape {tuple(given_B.shape)}, not ({policy_BT.shape[0]},)")
    given_B = given_B.detach().to(policy_BT.dtype)
    require(
        (torch.isfinite(given_B) & (given_B >= 0)).all(),
        lambda: ObjectiveError("sequence_weights_B holds a weight that is negative or not finite"),
    )
    return given_B


def _check_finite(mask_BT: Tensor, *values: Tensor | None) -> None:
    """Only a failure is examined further."""
    given = [value_BT for value_BT in values if value_BT is not None]
    finite_BT = torch.isfinite(given[0])
    for value_BT in given[1:]:
        finite_BT = finite_BT & torch.isfinite(value_BT)
    require(finite_BT.all(), lambda: _not_finite(finite_BT))


def _not_finite(finite_BT: Tensor) -> NonFiniteInput:
    rows = sorted(set((~finite_BT).nonzero()[:, 0].tolist()))
    return NonFiniteInput(
        f"a log-prob or advantage is not finite at a trained position of {len(rows)} sequences (rows {rows[:8]}); "
        "refuse them before training"
    )
