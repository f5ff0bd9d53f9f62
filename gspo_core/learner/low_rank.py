"""Low-rank additions to linear layers (LoRA) through `peft`, imported only when used.

One rule: each publication computes the sum of weights and additions afresh and never modifies the weights, so
publishing does not affect training. It trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gspo_core.learner_config import LoraConfig

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
                "of a mixture are none); name linear layers, or all-linear"
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


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
                weight.copy_((up @ down).mul_(layer.scaling[ADAPTER]).cpu().add_(weight))


def under_plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the plain model among those of a model with additions."""
    return {name.replace(".base_layer.", "."): value for name, value in tensors.items() if ".lora_" not in name}
