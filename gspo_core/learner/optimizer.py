"""AdamW with a learning-rate schedule and clipping; a non-finite gradient changes nothing.

One rule: an update either applies a finite gradient or leaves weights, moments and counters bit for bit as they were.
It neither computes gradients nor saves its moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from gspo_core.learner.ranks import whole
from gspo_core.learner_config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """The learning rate of all updates in step `step`, counted from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.decay_steps or total_steps
    assert end is not None, "checked by LearnerConfig"
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters; only matrices decay."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, foreach=True
    )


@dataclass(frozen=True)
class Update:
    """The result of one update."""

    grad_norm: float
    """Norm before clipping; not finite if the update was skipped."""

    @property
    def applied(self) -> bool:
        return math.isfinite(self.grad_norm)


def apply_update(optimizer: torch.optim.Optimizer, lr: float, max_grad_norm: float | None) -> Update:
    """Apply one update from the accumulated gradients, then clear them even if it was skipped."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # treat a missing gradient as 0, so the moments keep decaying
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    update = Update(grad_norm=float(norm))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if update.applied:
        if max_grad_norm is not None and update.grad_norm > max_grad_norm:
            torch._foreach_mul_(gradients, max_grad_norm / update.grad_norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return update
