"""The one seam between training and the code of a model: what the learner needs of a policy, and how it is found.

One rule: training, the optimizer and saved states know a policy by this class alone, and every option of the learner
that a policy does not know is refused by name. Another library's model (TorchTitan, Megatron) is a module with
`OPTIONS` and `load_policy`, and its line in `gspo_core.learner_config.POLICIES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gspo_core.batch import MicroBatch
from gspo_core.learner.ranks import Ranks
from gspo_core.learner_config import POLICIES, LearnerConfig, LearnerOptions


class UnsupportedModel(ValueError):
    """This learner cannot train the model."""


@dataclass(frozen=True)
class Copy:
    """A snapshot of the weights or the state; with several ranks, each holds a share.

    Writing needs no other rank and may run in its own thread while the learner continues.
    """

    write_share: Callable[[Path], None]
    """Writes this rank's files to a directory that all ranks share."""
    complete: Callable[[Path], None]
    """Joins the shares; runs on the first rank after every rank has written its own."""

    def write(self, directory: Path) -> None:
        """Write the whole copy; for a single rank only."""
        self.write_share(directory)
        self.complete(directory)


class TrainedPolicy(nn.Module, ABC):
    """A model that is trained. Its parameters are plain tensors on one rank; on several, DTensors that are sharded by
    rows, or whatever `settle` and `sum_between_copies` are written for. Those that require a gradient are trained."""

    ranks: Ranks
    dtype: torch.dtype
    """In which it computes, and is published."""

    @abstractmethod
    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """(N,) log-probs in float32 of the scored tokens, each given its prefix at its temperature; differentiable."""

    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """What is sharded, recomputed and compiled as one piece."""

    @abstractmethod
    def copy_weights(self) -> Copy:
        """A copy of what engines are given: a plain model directory, or what the job publishes instead. Every rank must
        call this."""

    def copy_adapter(self) -> Copy:
        """The same of low-rank additions alone."""
        raise ValueError("this learner trains no low-rank additions")

    def beneath_additions(self, micro_batch: MicroBatch) -> Tensor:
        """What `forward` would give without low-rank additions."""
        raise ValueError("this learner trains no low-rank additions")

    def settle(self) -> None:
        """Called before parameters are read or written: each rank then holds its part of them and no more."""
        self.ranks.settle(self)

    def sum_between_copies(self, *, now: bool) -> None:
        """Called before each forward pass with gradient: whether its gradients are added up between copies of the
        model, or a later pass does that. A backward pass adds up those of all ranks that share a copy."""
        self.ranks.sum_between_copies(self, now=now)


# Options that the learner itself acts on, whatever the policy.
_OF_LEARNER = frozenset({"policy", "micro_batch_tokens", "fused_optimizer", "offload_moments"})


def load_policy(model_dir: Path, config: LearnerConfig, device: torch.device, ranks: Ranks) -> TrainedPolicy:
    """The policy that the configuration names; each rank holds its part of the model at `model_dir`."""
    module: Any = import_module(POLICIES[config.policy])
    known = _OF_LEARNER | module.OPTIONS
    for name, field in LearnerOptions.model_fields.items():
        if name not in known and getattr(config, name) not in (field.get_default(), *_SETTLED.get(name, ())):
            raise UnsupportedModel(f"learner.{name}: the policy {config.policy} does not know it; leave it out")
    policy: TrainedPolicy = module.load_policy(model_dir, config, device, ranks)
    return policy


# What `auto` becomes where nothing asks for more.
_SETTLED = {"activation_checkpointing": (False,)}
