"""AdamW whose moments are kept smaller than float32, or in the host's memory, between updates.

One rule: an update computes with float32 moments on the device, those of some parameters at a time, by torch's own
AdamW. Where the moments are kept changes no bit; keeping them in eight bits changes results (`eight_bits`). Vectors
(norms, biases) keep float32: they are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gspo_core.learner.eight_bits import Codes, narrowed, widened
from gspo_core.learner.ranks import local, spread_like

MEAN, SQUARE = "exp_avg", "exp_avg_sq"
SCALES = {MEAN: "exp_avg_scale", SQUARE: "exp_avg_sq_scale"}


class KeptAdamW(torch.optim.Optimizer):
    """Its states hold plain tensors of this rank's rows."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        is_fused: bool,
        is_small: bool,
        on_host: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.is_fused, self.is_small, self.on_host = is_fused, is_small, on_host

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, group by group."""
        assert closure is None
        number = self._num_updates() + 1 if self.is_small else 0
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            steps = [self._next_step(one) for one in parameters]
            means, squares = ([self.moment(one, kind) for one in parameters] for kind in (MEAN, SQUARE))
            adamw(
                *([local(one.detach()) for one in parameters], [local(one.grad) for one in parameters]),
                *(means, squares, [], steps),
                foreach=not self.is_fused,
                fused=self.is_fused,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, mean, square in zip(parameters, means, squares, strict=True):
                self._keep(parameter, MEAN, mean, number)
                self._keep(parameter, SQUARE, square, number)

    def moment(self, parameter: nn.Parameter, kind: str) -> Tensor:
        """This rank's rows of a moment on the device, in float32, in memory of their own."""
        state, device = self.state[parameter], local(parameter.detach()).device
        if kind not in state:
            return torch.zeros_like(local(parameter.detach()))
        kept: Tensor = state[kind].to(device)
        if SCALES[kind] in state:
            return widened(Codes(kept, state[SCALES[kind]].to(device)), is_signed=kind == MEAN)
        return kept.clone() if kept is state[kind] else kept

    def loaded(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state that was read, as this optimizer keeps it."""
        device = local(parameter.detach()).device
        kept = {key: self._at_home(value, device) for key, value in moments.items() if key != "step"}
        return {"step": self._step_at_home(moments["step"], device), **kept}

    def _next_step(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = self._step_at_home(torch.tensor(0.0), local(parameter.detach()).device)
        step: Tensor = state["step"]
        return step

    def _step_at_home(self, step: Tensor, device: torch.device) -> Tensor:
        return step.to(device if self.is_fused else "cpu", torch.float32, copy=True)

    def _num_updates(self) -> int:
        """So far; read once, since on a device each reading waits for it."""
        return next((int(state["step"]) for state in self.state.values() if "step" in state), 0)

    def _keep(self, parameter: nn.Parameter, kind: str, value: Tensor, number: int) -> None:
        state = self.state[parameter]
        if self.is_small and value.ndim > 1:
            codes = narrowed(value, number, is_signed=kind == MEAN)
            found = {kind: codes.codes, SCALES[kind]: codes.scales}
        else:
            found = {kind: value}
        for key, made in found.items():
            if key in state:
                state[key].copy_(made)
            else:
                state[key] = self._at_home(made, made.device)

    def _at_home(self, value: Tensor, device: torch.device) -> Tensor:
        if not self.on_host:
            return value.to(device, copy=True)
        kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=device.type == "cuda")
        return kept.copy_(value)


def loaded_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, moments: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The state of a parameter that was read, as the optimizer keeps it.

    Each is copied: what was read lies anywhere in the memory of its file, and kernels sum in another order, so round
    otherwise, where a tensor does not begin at the address of a vector.
    """
    if isinstance(optimizer, KeptAdamW):
        return optimizer.loaded(parameter, moments)
    device = local(parameter.detach()).device
    is_fused = bool(optimizer.param_groups[0].get("fused"))
    return {
        key: (value.to(device) if is_fused else value)
        if key == "step"
        else spread_like(value.to(device, copy=True), parameter)
        for key, value in moments.items()
    }


def keeps_small(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, KeptAdamW) and optimizer.is_small
