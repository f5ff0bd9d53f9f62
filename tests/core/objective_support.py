"""Random batches and configurations for the tests of the objective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo_core.objective import LossStats, ObjectiveConfig, policy_loss

OFF: dict[str, Any] = {"k3_gate": None, "outlier_gate": None, "off_policy_gate": None, "correction": "none"}
"""Plain losses: no correction, no gates."""

ON: dict[str, Any] = {"k3_gate": 0.08, "outlier_gate": 3.0, "off_policy_gate": 0.1, "staleness_cap": 6}
"""Gates that act on some rows of `random_example` and not on others."""

CLIP: dict[str, Any] = {"clip": [3e-4, 4e-4]}
TOKEN_CLIP: dict[str, Any] = {"clip": [2e-3, 3e-3]}


def _named(**given: Any) -> ObjectiveConfig:
    return ObjectiveConfig(**{**ON, **given})


CONFIGS: dict[str, ObjectiveConfig] = {
    "sequence": _named(),
    "sequence_shared": _named(gradient="shared"),
    "sequence_by_token": _named(aggregate="token"),
    "sequence_by_sum": _named(aggregate="sum"),
    "sequence_geometric": _named(correction="geometric", geometric_gate=1.2),
    "sequence_product": _named(correction="product", aggregate="token"),
    "sequence_icepop": _named(correction="icepop", correction_min=0.6, correction_max=1.6),
    "sequence_product_mask": _named(correction="product_mask", correction_min=0.2),
    "sequence_mean_advantage": _named(advantage_reduction="mean", gradient="shared", aggregate="sum"),
    "sequence_dual_clip": _named(dual_clip=1.0001, clip=0.9),
    "sequence_kl": _named(kl_coef=0.1, kl_unbiased=True),
    "behavior": _named(anchor="behavior", clip=0.02),
    "behavior_plain": _named(anchor="behavior", clip=0.02, compensate=False, gradient="shared"),
    "behavior_band": _named(anchor="behavior", band={"kappa": 1e-3, "max": 0.5}),
    "turn": _named(ratio="turn"),
    "turn_shared_by_token": _named(ratio="turn", gradient="shared", aggregate="token"),
    "turn_by_sum_behavior": _named(ratio="turn", aggregate="sum", anchor="behavior", clip=0.02),
    "token": _named(ratio="token", **TOKEN_CLIP),
    "token_by_token": _named(ratio="token", aggregate="token", **TOKEN_CLIP),
    "token_by_sum_behavior": _named(ratio="token", aggregate="sum", anchor="behavior", clip=0.2),
    "cispo": _named(loss="cispo", aggregate="token", clip=2e-3),
    "sapo": _named(loss="sapo"),
    "sapo_token": _named(loss="sapo", ratio="token", gradient="per_token"),
    "gmpo": _named(loss="gmpo", gmpo_clip=1e-3, advantage_reduction="mean"),
    "dppo_tv": _named(loss="dppo_tv", dppo_delta=1e-3),
    "dppo_kl": _named(loss="dppo_kl", dppo_delta=1e-6),
    "vespo": _named(loss="vespo", aggregate="token"),
}


@dataclass(frozen=True)
class Example:
    """One batch; advantages are (B, T)."""

    policy: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor
    mask: Tensor
    advantages: Tensor
    turn_ids: Tensor
    staleness: Tensor
    weights: Tensor

    def change(self, **fields: Tensor) -> Example:
        return replace(self, **fields)

    def rows(self, index: Any) -> Example:
        return Example(**{name: value[index] for name, value in self.__dict__.items()})

    def map(self, function: Any) -> Example:
        return Example(**{name: function(name, value) for name, value in self.__dict__.items()})

    @property
    def denominators(self) -> dict[str, float]:
        lengths = self.mask.sum(-1)
        return {
            "num_sequences": float(self.weights.sum()),
            "num_tokens": float((self.weights * lengths).sum()),
        }


def random_example(seed: int, num_rows: int = 5, num_tokens: int = 14, per_token: bool = True) -> Example:
    """Rows with several turns, one without any trained token, drift that makes every gate act on some row."""
    rng = np.random.default_rng(seed)
    shape = (num_rows, num_tokens)
    runs = rng.random(shape) < 0.3
    turn_ids = np.cumsum(runs, axis=1)
    mask = (turn_ids % 2 == rng.integers(0, 2, (num_rows, 1))) & (rng.random(shape) < 0.95)
    mask[0, :] = mask[0, :] & (rng.random() < 0.5)
    proximal = -rng.exponential(1.0, shape) - 0.05
    policy = proximal + rng.normal(0, 2e-3, shape) + rng.normal(0, 5e-4, (num_rows, 1))
    drift = rng.normal(0, 0.25, shape) + rng.normal(0, 0.1, (num_rows, 1))
    drift += (rng.random(shape) < 0.01) * 3.5
    advantages = np.repeat(rng.choice([-1.3, -0.4, 0.0, 0.6, 1.1], (num_rows, 1)), num_tokens, axis=1)
    if per_token:
        advantages = advantages + rng.choice([0.0, 0.7, -0.7], shape) * (rng.random((num_rows, 1)) < 0.5)
    # As recorded: exactly representable in float32.
    behavior = np.float32(np.minimum(proximal - drift, 0.0)).astype(np.float64)
    return Example(
        policy=torch.tensor(policy),
        proximal=torch.tensor(proximal),
        behavior=torch.tensor(np.where(mask, behavior, 0.0)),
        reference=torch.tensor(proximal + rng.normal(0, 0.3, shape)),
        mask=torch.tensor(mask),
        advantages=torch.tensor(advantages),
        turn_ids=torch.tensor(turn_ids),
        staleness=torch.tensor(rng.integers(0, 9, shape)),
        weights=torch.tensor(rng.choice([1.0, 1.0, 0.5], num_rows)),
    )


@dataclass(frozen=True)
class Result:
    loss: float
    grad: Tensor
    stats: LossStats


def run(config: ObjectiveConfig, example: Example, **given: Any) -> Result:
    """Loss, gradient and statistics."""
    policy = example.policy.detach().clone().requires_grad_()
    loss, stats = policy_loss(
        config,
        policy,
        example.mask,
        example.advantages,
        **{
            "proximal_logprobs_BT": example.proximal,
            "behavior_logprobs_BT": example.behavior,
            "reference_logprobs_BT": example.reference if config.kl_coef else None,
            "turn_ids_BT": example.turn_ids,
            "staleness_BT": example.staleness,
            "sequence_weights_B": example.weights,
            **given,
        },
    )
    loss.backward()
    assert policy.grad is not None
    return Result(float(loss.detach()), policy.grad, stats)


def assert_same(left: Result, right: Result, grad: Tensor | None = None, *, tolerance: float = 1e-12) -> None:
    """Equal loss, gradient and statistics, up to float64 rounding."""
    scale = 1 + abs(left.loss)
    assert abs(left.loss - right.loss) <= tolerance * scale, (left.loss, right.loss)
    torch.testing.assert_close(left.grad, right.grad if grad is None else grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.stats.sums, right.stats.sums, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.stats.maxima, right.stats.maxima, rtol=tolerance, atol=tolerance)
