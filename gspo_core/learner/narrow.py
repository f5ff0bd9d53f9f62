"""Computing in half precision with weights that are kept in float32, one module's at a time.

One rule: a single rank computes what each of several does. FSDP hands every module its weights in half precision, so
what flows between layers is half precision too; autocast alone would leave it, and experts, in float32. The weights
themselves stay as they are, and their gradients arrive in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on each module of `model` computes with its weights in `dtype`."""
    for module in model.modules():
        names = [name for name, weight in module.named_parameters(recurse=False) if weight.dtype != dtype]
        if names:
            _narrow(module, names, dtype)


def _narrow(module: nn.Module, names: list[str], dtype: torch.dtype) -> None:
    kept: dict[str, Any] = {}
    weights: dict[str, Any] = module._parameters

    def narrow(*_: Any) -> None:
        for name in names:
            kept[name] = weights[name]
            weights[name] = kept[name].to(dtype)

    def restore(*_: Any) -> None:
        for name in list(kept):
            weights[name] = kept.pop(name)

    module.register_forward_pre_hook(narrow)
    module.register_forward_hook(restore, always_call=True)
