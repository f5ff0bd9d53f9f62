"""Routing Replay for mixtures of experts: reuses the experts chosen in one forward pass in another.

One rule: it replays only the choice of experts; their weights come from the current router, with its gradient. It
refuses unknown routers. It does not decide when to record or replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Routes = dict[str, Tensor]
Routed = tuple[Tensor, Tensor, Tensor]
"""Logits, weights and indices of the chosen experts."""


class UnsupportedRouter(NotImplementedError):
    """The model has no router whose choices can be replayed."""


class RoutingReplay:
    """Hooks into a model's routers; inactive outside its two contexts."""

    def __init__(self, model: nn.Module) -> None:
        self._recorded: Routes | None = None
        self._replayed: Routes | None = None
        routers = {name: module for name, module in model.named_modules() if _is_softmax_router(module)}
        if not routers:
            raise UnsupportedRouter(
                "routing_replay needs routers with a softmax over experts and the largest chosen (as in Qwen3-MoE); "
                f"{type(model).__name__} has none"
            )
        for name, router in routers.items():
            router.register_forward_hook(self._hook(name))

    @contextlib.contextmanager
    def record(self) -> Iterator[Routes]:
        """Record the choices of the enclosed forward pass."""
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextlib.contextmanager
    def replay(self, routes: Routes) -> Iterator[None]:
        """Impose recorded choices on the enclosed forward pass and on its recomputation in the backward pass."""
        self._replayed = routes
        try:
            yield
        finally:
            self._replayed = None

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Routed], Routed]:
        def on_forward(router: nn.Module, _: tuple[Tensor, ...], output: Routed) -> Routed:
            logits, weights, experts = output
            if self._recorded is not None:
                _check_known(router, logits, weights, experts)
                self._recorded[name] = experts.detach()
            if self._replayed is None:
                return output
            experts = self._replayed[name]
            return logits, _expert_weights(router, logits, experts).to(weights.dtype), experts

        return on_forward


def _expert_weights(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    weights = torch.softmax(logits, dtype=torch.float32, dim=-1).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights


def _check_known(router: nn.Module, logits: Tensor, weights: Tensor, experts: Tensor) -> None:
    """Reject routers that use the same names but a different formula."""
    ours = _expert_weights(router, logits, experts).to(weights.dtype)
    if not torch.allclose(ours, weights, rtol=1e-2, atol=1e-4):
        raise UnsupportedRouter(f"{type(router).__name__} weighs experts by another formula: routing_replay cannot")


def _is_softmax_router(module: nn.Module) -> bool:
    known = type(module).__name__.endswith("TopKRouter")
    return known and all(hasattr(module, name) for name in ("top_k", "num_experts", "norm_topk_prob"))
