"""Low-rank additions to the experts of a mixture, whose weights are one tensor for all experts.

One rule: every projection of every expert has an addition of its own, as where each is a linear layer, so what is
published has the names and shapes that `peft` gave to such layers and that engines serve. No sum of weights and
additions is made for computing: additions pass beside the weights, in grouped products. It knows only experts whose
forward pass is the plain gated one, and refuses others.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gspo_core.learner.ranks import rows_of, spread_like
from gspo_core.lora_adapter import add_product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Kernels of grouped products want rows that begin at multiples of so many bytes.
_ALIGNED_BYTES = 16
# What transformers says of experts whose weights are [gate; up] and down, rows of outputs first, without biases.
_PLAIN = {
    "has_gate": True,
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_post_expert_norm": False,
}


class UnsupportedExperts(ValueError):
    """The model has no experts to which additions are known."""


def add_to_experts(model: PreTrainedModel, rank: int, scaling: float) -> None:
    """Insert additions without effect, drawn unless the model is on the meta device. Raises UnsupportedExperts."""
    found = {name: module for name, module in model.named_modules() if _is_stack(module)}
    if not found:
        raise UnsupportedExperts(f"lora.experts: {type(model).__name__} has no experts in one tensor")
    _check_names(model)
    for name, module in found.items():
        experts: Any = module
        strange = [key for key, value in _PLAIN.items() if getattr(experts, key, None) is not value]
        if strange:
            raise UnsupportedExperts(f"lora.experts: {name} is another kind of experts than is known ({strange[0]})")
        experts.lora_scaling, experts._disable_adapters = scaling, False
        for projection in PROJECTIONS:
            rows, columns = _part(experts, projection).shape[1:]
            device = experts.down_proj.device
            for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                made = torch.zeros((experts.num_experts, *shape), device=device)
                experts.register_parameter(f"lora_{half}_{projection}", nn.Parameter(made))
            if device.type != "meta":
                _draw(experts, projection, device)
        experts.forward = types.MethodType(_forward, experts)


def expert_stacks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Experts that have additions."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A_down_proj"))


def draw_expert_additions(model: nn.Module, device: torch.device) -> None:
    """Give additions that were made on the meta device their memory and first values, this rank's experts of them.

    Each is drawn whole, in the order in which a single rank draws: any number of ranks starts from the same.
    """
    for _, experts in expert_stacks(model):
        for projection in PROJECTIONS:
            _draw(experts, projection, device)


@torch.no_grad()
def _draw(experts: Any, projection: str, device: torch.device) -> None:
    """As `peft` begins for a linear layer: uniform below one over the root of the inputs, and zeros."""
    for half in ("A", "B"):
        made = getattr(experts, f"lora_{half}_{projection}")
        values = torch.zeros(made.shape)
        if half == "A":
            values.uniform_(-1 / math.sqrt(made.shape[-1]), 1 / math.sqrt(made.shape[-1]))
        start, end = rows_of(made)
        part = values[start:end].to(device, copy=True)
        setattr(experts, f"lora_{half}_{projection}", nn.Parameter(spread_like(part, made.detach())))


def expert_pairs(model: nn.Module, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, up and down of every addition, as if each expert's projections were layers; every rank must call this."""
    for name, experts in expert_stacks(model):
        for projection in PROJECTIONS:
            for number, (up, down) in enumerate(_pairs(experts, projection, whole)):
                yield f"{name}.{number}.{projection}", up, down


def names_of_projections(model: nn.Module) -> list[str]:
    """Those that additions to all experts of the model have."""
    stacks: list[tuple[str, Any]] = [(name, module) for name, module in model.named_modules() if _is_stack(module)]
    return [
        f"{name}.{number}.{projection}"
        for name, experts in stacks
        for projection in PROJECTIONS
        for number in range(experts.num_experts)
    ]


def add_to_stacks(tensors: Mapping[str, Tensor], model: nn.Module, whole: Callable[[Tensor], Tensor]) -> None:
    """Sum each addition into the copy of its weight in ``tensors``, where there is one; every rank must call this."""
    for name, experts in expert_stacks(model):
        for projection in PROJECTIONS:
            pairs = _pairs(experts, projection, whole)
            stack = tensors.get(f"{name}.{_stack_of(projection)}")
            if stack is not None:
                for weight, (up, down) in zip(_rows(stack, projection), pairs, strict=True):
                    weight.copy_(add_product(weight, up, down, experts.lora_scaling))


def _pairs(experts: Any, projection: str, whole: Callable[[Tensor], Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Copies: where a matrix begins at any address, a product of it may be summed in another order."""
    up, down = (whole(getattr(experts, f"lora_{half}_{projection}").detach()) for half in ("B", "A"))
    return [(one.clone(), other.clone()) for one, other in zip(up, down, strict=True)]


def _is_stack(module: nn.Module) -> bool:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return hasattr(module, "num_experts") and all(isinstance(one, nn.Parameter) and one.ndim == 3 for one in weights)


def _check_names(model: PreTrainedModel) -> None:
    """In files every expert has projections of its own, under the names by which additions are published."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    for one in get_model_conversion_mapping(model):
        last = [pattern.removesuffix(".weight").rpartition(".")[2] for pattern in one.source_patterns]
        if last == ["gate_proj", "up_proj"] and one.target_patterns[0].endswith(".gate_up_proj"):
            return
    raise UnsupportedExperts(f"lora.experts: files of {type(model).__name__} name the projections of experts otherwise")


def _stack_of(projection: str) -> str:
    return "down_proj" if projection == "down_proj" else "gate_up_proj"


def _rows(stack: Tensor, projection: str) -> Tensor:
    """The part of a stack of weights that is one projection of all experts."""
    if projection == "down_proj":
        return stack
    gate, up = stack.chunk(2, dim=1)
    return gate if projection == "gate_proj" else up


def _part(experts: Any, projection: str) -> Tensor:
    return _rows(getattr(experts, _stack_of(projection)), projection)


def _forward(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """As transformers groups tokens by expert, with the additions beside the weights."""
    if experts._disable_adapters:
        result: Tensor = type(experts).forward(experts, hidden, chosen, shares)
        return result
    num_chosen = chosen.shape[-1]
    numbers, order = torch.sort(chosen.reshape(-1))
    ends = _ends(numbers, experts.num_experts)
    rows = hidden[order // num_chosen]
    added = [_addition(experts, projection, rows, ends) for projection in ("gate_proj", "up_proj")]
    inner = experts._apply_gate(_grouped(rows, experts.gate_up_proj, ends) + torch.cat(added, -1))
    outer = _grouped(inner, experts.down_proj, ends) + _addition(experts, "down_proj", inner, ends)
    weighted = outer * shares.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    summed = weighted[back].view(-1, num_chosen, hidden.shape[-1]).sum(1)
    return summed.to(hidden.dtype)


def _ends(numbers: Tensor, num_experts: int) -> Tensor:
    """Where the rows of each expert end. `histc`, because counting by `bincount` waits for the device."""
    kind = torch.float32 if numbers.device.type == "cpu" else torch.int32
    counts = torch.histc(numbers.to(kind), bins=num_experts, min=0, max=num_experts - 1)
    return counts.cumsum(0, dtype=torch.int32)


def _addition(experts: Any, projection: str, rows: Tensor, ends: Tensor) -> Tensor:
    down, up = (getattr(experts, f"lora_{half}_{projection}") for half in ("A", "B"))
    lacking = -down.shape[1] % (_ALIGNED_BYTES // down.element_size())
    if lacking:
        down, up = nn.functional.pad(down, (0, 0, 0, lacking)), nn.functional.pad(up, (0, lacking))
    return _grouped(_grouped(rows, down, ends), up, ends) * float(experts.lora_scaling)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each row by the transpose of its own expert's matrix."""
    from transformers.integrations.moe import _grouped_linear

    if weights.dtype == torch.float64:  # which no kernel of grouped products takes
        product: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weights.transpose(-2, -1), ends)
    else:
        product = _grouped_linear(rows, weights, ends)
    return product
