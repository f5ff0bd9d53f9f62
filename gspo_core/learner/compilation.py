"""Compiled layers (`torch.compile`): fewer, larger kernels between the products of matrices.

One rule: where nothing can be compiled, that is said by name before training, not by the first step. Attention over a
packing stays as it is: its pieces differ from batch to batch, and each would be compiled anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gspo_core.learner.attention import PACKED, packed_attention
from gspo_core.learner.policy import UnsupportedModel


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Compile the layers when they first run. Raises UnsupportedModel where this machine has no compiler.

    What is compiled is the function of a layer, which all layers share, beneath what is wrapped around each: hooks of
    FSDP, and recomputing, whose checkpoints are left alone by the compiler with all that they hold.
    """
    _try(device)
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
    for layer in layers:
        if not hasattr(layer, "gradient_checkpointing"):
            raise UnsupportedModel(f"learner.compile_layers: {type(layer).__name__} has no function to compile")
        wrapped: Any = layer
        again = wrapped._gradient_checkpointing_func if wrapped.gradient_checkpointing else _once
        wrapped._gradient_checkpointing_func = functools.partial(_call_compiled, again)
        wrapped.gradient_checkpointing = True
        layer.training = True  # the layer requires it; its submodules stay without dropout


def _once(forward: Callable[..., Any], *given: Any) -> Any:
    return forward(*given)


def _call_compiled(again: Callable[..., Any], forward: functools.partial[Any], *given: Any) -> Any:
    compiled = _compiled(forward.func)
    return again(functools.partial(compiled, *forward.args, **forward.keywords), *given)


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, dynamic=True)


def _try(device: torch.device) -> None:
    """Compile something small, with the gradient that a step needs too."""

    def small(numbers: Tensor) -> Tensor:
        return (numbers * 2).sin().sum()

    numbers = torch.ones(8, device=device, requires_grad=True)
    try:
        found = torch.compile(small)(numbers)
        found.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # of which all that dynamo and inductor raise are kinds
        reason = " ".join(str(error).strip().splitlines()[:2])
        raise UnsupportedModel(
            f"learner.compile_layers: nothing can be compiled for {device.type} here ({type(error).__name__}: "
            f"{reason}); leave it out, or install a compiler"
        ) from error
