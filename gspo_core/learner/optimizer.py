"""AdamW with a learning-rate schedule and clipping; a non-finite gradient changes nothing.

One rule: an update either applies a finite gradient or leaves weights, moments and counters bit for bit as they were.
It neither computes gradients nor saves its moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo_core.bounds import exceeds
from gspo_core.learner.moments import MEAN, SQUARE, KeptAdamW
from gspo_core.learner.ranks import local, spread_like, sum_of_parts, whole
from gspo_core.learner_config import OptimizerConfig
from gspo_core.objective.checks import HOLDS, Checks
from gspo_core.plan import FLOAT, UPDATED_AT_ONCE_BYTES


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


def build_adamw(
    model: nn.Module, config: OptimizerConfig, *, is_fused: bool = False, on_host: bool = False
) -> torch.optim.Optimizer:
    """Build AdamW over the trainable parameters; only matrices decay.

    They are updated some at a time, because AdamW makes the roots of the second moments of a whole group at once, and
    moments that are kept elsewhere or in eight bits are there in float32 for a group at once.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": piece, "weight_decay": decay}
        for is_matrix, decay in ((True, config.weight_decay), (False, 0.0))
        for piece in _pieces([p for p in trainable if (p.ndim >= 2) == is_matrix])
    ]
    rates: Any = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    is_small = config.moments == "8bit"
    if is_small or on_host:
        return KeptAdamW(groups, **rates, is_fused=is_fused, is_small=is_small, on_host=on_host)
    return torch.optim.AdamW(groups, **rates, foreach=not is_fused, fused=is_fused)


def _pieces(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    piece: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        own = local(parameter.detach()).numel() * FLOAT
        if piece and size + own > UPDATED_AT_ONCE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(parameter)
        size += own
    if piece:
        yield piece


@dataclass(frozen=True)
class Update:
    """The result of one update."""

    grad_norm: float
    """Norm before clipping; not finite if the update was skipped."""
    bound: float = math.inf
    """A longer gradient was scaled down to this norm."""
    alignment: float | None = None
    """Cosine of the gradient with the running mean of the earlier ones; None before the first."""

    @property
    def applied(self) -> bool:
        return math.isfinite(self.grad_norm)

    @property
    def was_bounded(self) -> bool:
        return self.applied and exceeds(self.grad_norm, self.bound)


def apply_update(
    optimizer: torch.optim.Optimizer, lr: float, config: OptimizerConfig, checks: Checks | None = None
) -> Update:
    """Apply one update from the accumulated gradients, then clear them even if it was skipped.

    All that the host must know before anything moves is read at once: each reading waits for the device. `checks` are
    those of the passes that made the gradients; raises what fails of them.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # treat a missing gradient as 0, so the moments keep decaying
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    numbers = {"norm": whole(torch.nn.utils.get_total_norm(gradients)), **_beside_the_mean(optimizer)}
    if config.max_grad_growth:
        numbers |= _usual(optimizer)
    if checks is not None:
        numbers |= checks.all_hold()
    found = _read(numbers)
    if checks is not None and not found.get(HOLDS, 1.0):
        checks.raise_first()
    update = Update(found["norm"], _bound(optimizer, config, found), _alignment(found))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if update.applied:
        if update.was_bounded:
            torch._foreach_mul_(gradients, update.bound / update.grad_norm)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return update


def _read(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """One wait for the device. As doubles, which hold every float32 as it is."""
    device = numbers["norm"].device
    values = torch.stack([number.detach().to(device, torch.float64) for number in numbers.values()]).tolist()
    return dict(zip(numbers, values, strict=True))


def _bound(optimizer: torch.optim.Optimizer, config: OptimizerConfig, found: Mapping[str, float]) -> float:
    bounds = [math.inf if config.max_grad_norm is None else config.max_grad_norm]
    if config.max_grad_growth:
        usual = _usual_norm(optimizer, found)
        bounds.append(config.max_grad_growth * usual if usual > 0 else math.inf)
    return min(bounds)


def _beside_the_mean(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The norm of the running mean of gradients, and the product of both; nothing before the first update."""
    pairs = [(one, one.grad) for one, state in _states(optimizer) if MEAN in state and one.grad is not None]
    if not pairs:
        return {}
    products = []

    def means() -> Iterator[Tensor]:
        for parameter, gradient in pairs:
            mean = _moment(optimizer, parameter, MEAN)
            products.append(local(gradient).flatten().dot(local(mean).flatten()))
            yield mean

    norm = _total_norm(optimizer, means(), 2.0)
    return {"product": sum_of_parts(torch.stack(products).sum(), pairs[0][1]), "mean": norm}


def _moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, kind: str) -> Tensor:
    """Shaped and sharded as the parameter."""
    if isinstance(optimizer, KeptAdamW):
        return spread_like(optimizer.moment(parameter, kind), parameter.detach())
    kept: Tensor = optimizer.state[parameter][kind]
    return kept


def _total_norm(optimizer: torch.optim.Optimizer, tensors: Iterator[Tensor], norm_type: float) -> Tensor:
    """The norm of all together. With ``KeptAdamW``, tensors are made one at a time; the result is the same."""
    if not isinstance(optimizer, KeptAdamW):
        return whole(torch.nn.utils.get_total_norm(list(tensors), norm_type=norm_type))
    norms = [_norm(tensor, norm_type) for tensor in tensors]
    return whole(torch.linalg.vector_norm(torch.stack(norms), norm_type))


def _norm(tensor: Tensor, norm_type: float) -> Tensor:
    """By the kernel that `get_total_norm` takes."""
    if tensor.is_cuda:
        (found,) = torch._foreach_norm([tensor], norm_type)
        return found
    norm: Tensor = torch.linalg.vector_norm(tensor, norm_type)
    return norm


def _alignment(found: Mapping[str, float]) -> float | None:
    length = found["norm"] * found.get("mean", 0.0)
    return found["product"] / length if length and math.isfinite(found["norm"]) else None


def _states(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, dict[str, Tensor]]]:
    """In the order of the parameters: that of the states is another one after they were loaded, and sums would round
    otherwise."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter, optimizer.state[parameter]) for parameter in parameters if parameter in optimizer.state]


def usual_grad_norm(optimizer: torch.optim.Optimizer) -> float:
    """Root mean square of the norms of the gradients applied so far, weighted as in the second moment; 0 before the
    first.

    The second moments of all elements add up to exactly that mean square, so there is no other state to keep.
    """
    return _usual_norm(optimizer, {name: float(number) for name, number in _usual(optimizer).items()})


def _usual(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = [(parameter, state) for parameter, state in _states(optimizer) if SQUARE in state]
    if not found:
        return {}
    squares = (_moment(optimizer, parameter, SQUARE) for parameter, _ in found)
    return {"squares": _total_norm(optimizer, squares, 1.0), "updates": found[0][1]["step"]}


def _usual_norm(optimizer: torch.optim.Optimizer, found: Mapping[str, float]) -> float:
    num_updates = found.get("updates", 0.0)
    beta = optimizer.param_groups[0]["betas"][1]
    return math.sqrt(found["squares"] / (1 - beta**num_updates)) if num_updates else 0.0
