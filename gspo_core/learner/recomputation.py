"""What of a layer is kept for its backward pass, and what is computed again in it.

One rule: results are the same to the bit, whatever is kept. With `keeps_attention` the results of attention stay, which
grows with the square of a sequence; all else of a layer is cheap beside the memory that it would take.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gspo_core.learner.policy import UnsupportedModel


def recompute(layers: Iterable[nn.Module], *, keeps_attention: bool = False) -> None:
    """From now on the layers compute again in the backward pass. Raises UnsupportedModel."""
    again = functools.partial(checkpoint, use_reentrant=False)
    if keeps_attention:
        again = functools.partial(again, context_fn=_attention_kept)
    for layer in layers:
        if not hasattr(layer, "gradient_checkpointing"):
            raise UnsupportedModel(f"{type(layer).__name__} cannot recompute its activations")
        # set what transformers' own switch sets, since its name varies between releases
        checkpointing: Any = layer
        checkpointing.gradient_checkpointing = True
        checkpointing._gradient_checkpointing_func = again
        layer.training = True  # the layer requires it; its submodules stay without dropout


def _attention_kept() -> Any:
    return create_selective_checkpoint_contexts(list(_attention_kernels()))  # type: ignore[no-untyped-call]


@functools.cache
def _attention_kernels() -> tuple[Any, ...]:
    """Those that scaled-dot-product attention chooses from, and the variable-length one."""
    import torch.nn.attention.varlen  # registers it

    aten = torch.ops.aten
    return (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    )
