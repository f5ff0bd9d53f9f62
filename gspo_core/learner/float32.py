"""Computing with weights that are kept in half precision as if they were float32, one module's at a time.

One rule: afterwards every weight is the very tensor that it was before. Modules in float32 stay untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """While a module computes, its own parameters are float32."""
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            kept[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = kept.pop(parameter)

    narrow = [
        module
        for module in model.modules()
        if any(parameter.dtype != torch.float32 for parameter in module.parameters(recurse=False))
    ]
    with contextlib.ExitStack() as stack:
        for module in narrow:
            stack.callback(module.register_forward_pre_hook(widen).remove)
            stack.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield
