"""What is written of a model of transformers for engines: a plain directory of it, or its low-rank additions alone.

One rule: what is copied is copied before training goes on, and writing it needs nothing of the model any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gspo_core.learner.low_rank import UnsupportedTarget, additions_of, check_mergeable, save_adapter
from gspo_core.learner.model_directory import copy_small_files, export_share, join_shares
from gspo_core.learner.policy import Copy, UnsupportedModel
from gspo_core.learner.ranks import Ranks, whole
from gspo_core.learner_config import LearnerConfig, LoraConfig
from gspo_core.lora_adapter import AdapterRefused, BaseWeights, describe_merged

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Origin:
    """Where a model comes from; its published versions repeat or refer to it."""

    model_dir: Path
    lora: LoraConfig | None = None
    base: BaseWeights | None = None
    """What a published adapter is over; None where whole weights are published."""


def origin_of(model: PreTrainedModel, model_dir: Path, config: LearnerConfig) -> Origin:
    """Raises UnsupportedModel for a base over which no adapter can be published."""
    if not config.publishes_adapter:
        return Origin(model_dir, config.lora)
    try:
        base = BaseWeights(model_dir)
        check_mergeable(model, base)
    except (AdapterRefused, UnsupportedTarget) as error:
        raise UnsupportedModel(str(error)) from error
    return Origin(model_dir, config.lora, base)


def whole_copy(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], origin: Origin, dtype: torch.dtype, ranks: Ranks
) -> Copy:
    """`tensors` are this rank's share of the plain model."""

    def write_share(directory: Path) -> None:
        export_share(model, tensors, Path(directory), ranks.rank)

    def complete(directory: Path) -> None:
        join_shares(Path(directory), ranks.num_ranks, source=origin.model_dir, dtype=dtype)

    return Copy(write_share, complete)


def adapter_copy(model: PreTrainedModel, origin: Origin) -> Copy:
    """The first rank writes it all: additions are small. Every rank must call this."""
    lora = origin.lora
    if lora is None:
        raise ValueError("this learner trains no low-rank additions")
    additions = additions_of(model, whole)

    def complete(directory: Path) -> None:
        save_adapter(model, additions, lora, origin.model_dir, Path(directory))

    return Copy(lambda _: None, complete)


def published_adapter_copy(model: PreTrainedModel, origin: Origin, base: BaseWeights, dtype: torch.dtype) -> Copy:
    """With the model's tokenizer and what comes out where it is merged, and without the model's configuration:
    transformers would take the folder for a whole model."""
    additions = adapter_copy(model, origin)

    def complete(directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        copy_small_files(directory, origin.model_dir)
        additions.complete(directory)
        describe_merged(base, directory, dtype)

    return Copy(additions.write_share, complete)
