"""What `auto` becomes for this learner, and whether its model fits its device: decided before anything is loaded.

One rule: decided by `gspo_core.plan` from the model, the ranks and the device's whole memory, so all ranks and all
attempts on machines of a kind decide alike. On a CPU nothing is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch

from gspo_core.learner.policy import UnsupportedModel
from gspo_core.learner.ranks import Ranks
from gspo_core.learner_config import LearnerConfig
from gspo_core.plan import (
    LearnerPlace,
    UnknownShape,
    arrangement_problem,
    choose,
    first_choice,
    planned_shape,
    refusal,
    usable,
)


class DoesNotFit(UnsupportedModel):
    """The model needs more memory than its devices have."""


def settled(
    model_dir: Path, config: LearnerConfig, device: torch.device, ranks: Ranks, *, has_reference: bool
) -> LearnerConfig:
    """The configuration without `auto`. Raises `DoesNotFit`, or `UnsupportedModel` where its heads cannot be shared."""
    if config.context_parallel > 1:
        _check_heads(model_dir, config, ranks)
    if device.type != "cuda":
        return first_choice(config)
    total = torch.cuda.get_device_properties(device).total_memory
    place = LearnerPlace(
        ranks.num_ranks,
        "cuda",
        usable(total),
        has_reference=has_reference,
        longest=config.longest_sequence,
        has_small_moments=config.optimizer.moments == "8bit",
    )
    return settled_at(model_dir, config, place)


def _check_heads(model_dir: Path, config: LearnerConfig, ranks: Ranks) -> None:
    try:
        num_heads = planned_shape(model_dir, config).num_heads
    except UnknownShape:
        return  # the check of the forward pass refuses it
    problem = arrangement_problem(config, ranks.num_ranks, num_heads)
    if problem:
        raise UnsupportedModel(problem)


def settled_at(model_dir: Path, config: LearnerConfig, place: LearnerPlace) -> LearnerConfig:
    """The same at a place that is given. A family whose memory cannot be planned recomputes its activations."""
    try:
        shape = planned_shape(model_dir, config)
    except UnknownShape:
        plain = first_choice(config)
        is_free = config.activation_checkpointing == "auto"
        return plain.model_copy(update={"activation_checkpointing": True}) if is_free else plain
    choice = choose(shape, config, place)
    if not choice.fits:
        raise DoesNotFit(refusal(choice, config, place))
    return config.model_copy(
        update={
            "micro_batch_tokens": choice.micro_batch_tokens,
            "activation_checkpointing": choice.activation_checkpointing,
            "layout": choice.layout,
            "offload_moments": choice.offload_moments,
        }
    )
