"""Low-rank additions (LoRA): to linear layers through `peft`, imported only when used, and to experts by our own code.

One rule: each publication computes the sum of weights and additions afresh and never modifies the weights, so
publishing does not affect training. It trains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gspo_core.batch import MicroBatch
from gspo_core.learner.expert_additions import (
    UnsupportedExperts,
    add_to_experts,
    add_to_stacks,
    draw_expert_additions,
    expert_pairs,
    expert_stacks,
    names_of_projections,
)
from gspo_core.learner.ranks import rows_of, spread_like
from gspo_core.learner_config import LoraConfig
from gspo_core.lora_adapter import AdapterRefused, BaseWeights, add_product, write_additions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "policy"


class MissingPackage(ImportError):
    """The configuration needs an optional package that is not installed."""


class UnsupportedTarget(ValueError):
    """A target layer is not linear."""


def add_low_rank(model: PreTrainedModel, config: LoraConfig) -> None:
    """Insert additions, initially without effect, and freeze everything else."""
    try:
        import peft
    except ImportError as error:
        raise MissingPackage("lora needs the package peft: install the extra 'lora'") from error
    targets = config.target_modules
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=_linear_layers(model) if targets == "all-linear" else list(targets),
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    peft.inject_adapter_in_model(peft_config, model, adapter_name=ADAPTER)
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not isinstance(module.base_layer, nn.Linear):
            raise UnsupportedTarget(
                f"lora.target_modules: {name} is a {type(module.base_layer).__name__}, not a linear layer (the experts "
                "of a mixture are none: lora.experts is for them); name linear layers, or all-linear"
            )
    if config.experts:
        try:
            add_to_experts(model, config.rank, config.alpha / config.rank)
        except UnsupportedExperts as error:
            raise UnsupportedTarget(str(error)) from error
    for name, parameter in model.named_parameters():
        is_added = "lora_" in name
        if is_added:  # peft makes them in the dtype of the frozen weights
            parameter.data = parameter.data.float()
        parameter.requires_grad_(is_added)


def without_additions(policy: nn.Module, micro_batch: MicroBatch) -> Tensor:
    """What `policy` computes from the frozen weights alone."""
    # peft's own switch also turns off gradients, which FSDP would then never turn on again
    layers: list[Any] = [module for module in policy.modules() if hasattr(module, "lora_A")]
    layers += [experts for _, experts in expert_stacks(policy)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        logprobs: Tensor = policy(micro_batch)
    finally:
        for layer in layers:
            layer._disable_adapters = False
    return logprobs


@torch.no_grad()
def draw_additions(model: PreTrainedModel, device: torch.device) -> None:
    """Give additions that were made on the meta device their memory and first values, this rank's rows of them.

    Each is drawn whole, in the order and number in which peft draws: any number of ranks starts from the same.
    """
    for module in model.modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
            first, second = (nn.Linear(one.in_features, one.out_features, bias=False) for one in (down, up))
            nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
            nn.init.zeros_(second.weight)
            for made, drawn in ((down, first), (up, second)):
                start, end = rows_of(made.weight)
                part = drawn.weight.detach()[start:end].to(device, copy=True)
                made.weight = nn.Parameter(spread_like(part, made.weight.detach()))
    draw_expert_additions(model, device)


def additions_of(model: nn.Module, whole: Callable[[Tensor], Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Copies of the additions, (up, down) by the name of the layer; every rank must call this."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            up, down = (whole(part[ADAPTER].weight.detach()) for part in (layer.lora_B, layer.lora_A))
            found[name] = up.to("cpu", copy=True), down.to("cpu", copy=True)
    for name, up, down in expert_pairs(model, whole):
        found[name] = up.cpu(), down.cpu()
    return found


def save_adapter(
    model: nn.Module,
    additions: Mapping[str, tuple[Tensor, Tensor]],
    config: LoraConfig,
    base: Path,
    directory: Path,
) -> None:
    """Write the additions alone in the format of `peft`, for engines that serve them over `base`."""
    said = {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": _last_names(list(additions), model),
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_additions(directory, additions, said, str(base))


def check_mergeable(model: nn.Module, base: BaseWeights) -> None:
    """Raises UnsupportedTarget where additions over the files of the base would not be the model that is trained."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    targets = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    experts = names_of_projections(model) if next(expert_stacks(model), None) else []
    advice = "use rollout.weight_transport disk, or other lora.target_modules"
    if tied := [name for name in targets if f"{name}.base_layer.weight" in shared]:
        raise UnsupportedTarget(f"{tied[0]} shares its weight with another layer: {advice}")
    try:
        base.check_targets(f"{name}.weight" for name in [*targets, *experts])
    except AdapterRefused as error:
        raise UnsupportedTarget(f"{error}: {advice}") from error


def _last_names(targets: list[str], model: nn.Module) -> list[str]:
    """Engines know layers by the last part of their names, such as q_proj; whole names only where that says more."""
    last = sorted({name.rpartition(".")[2] for name in targets})
    layers = [*(name for name, _ in model.named_modules()), *names_of_projections(model)]
    named = [name for name in layers if name.rpartition(".")[2] in last]
    return last if sorted(named) == sorted(targets) else sorted(targets)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """All linear layers but the head. peft's own option would include the experts and routers of a mixture."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]


def add_in_place(tensors: Mapping[str, Tensor], model: nn.Module, whole: Callable[[Tensor], Tensor]) -> None:
    """Sum each addition into the copy of its weight in ``tensors``, where there is one; every rank must call this.

    One addition at a time: all of them together are as large as the model.
    """
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layer: Any = module
            down, up = (whole(part[ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
            weight = tensors.get(f"{name}.base_layer.weight")
            if weight is not None:
                weight.copy_(add_product(weight, up, down, layer.scaling[ADAPTER]))
    add_to_stacks(tensors, model, whole)


def under_plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the plain model among those of a model with additions."""
    return {name.replace(".base_layer.", "."): value for name, value in tensors.items() if ".lora_" not in name}
