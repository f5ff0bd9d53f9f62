"""What a step knows of its batch as a whole, taken once before its first update. It computes no loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.batch import TrainSequence
from gspo_core.learner.trust_region import StepStart
from gspo_core.learner_config import OptimizerConfig
from gspo_core.objective.batch_bounds import BatchBounds
from gspo_core.objective_config import ObjectiveConfig


def teaches(sequence: TrainSequence) -> bool:
    """Whether any of its tokens has an advantage."""
    return bool(np.broadcast_to(sequence.advantages, sequence.num_tokens)[sequence.action_mask].any())


def signal_share(sequences: Sequence[TrainSequence]) -> float:
    """The share of a batch's sequences, by their weights, that teach; those without tokens to train do not count."""
    weights = [(sequence.weight, teaches(sequence)) for sequence in sequences if sequence.num_actions]
    whole = sum(weight for weight, _ in weights)
    return sum(weight for weight, is_telling in weights if is_telling) / whole if whole else 0.0


@dataclass(frozen=True)
class BatchView:
    """A batch as a whole, as it was before its first update."""

    objective: ObjectiveConfig
    """With the clip of this step."""
    bounds: BatchBounds
    rate_share: float = 1.0
    """Scales the learning rate to the batch's signal."""
    logprobs: Sequence[NDArray[np.float32]] = ()
    """For its sampled tokens, under the weights that the step starts from."""
    start: StepStart | None = None
    """Where the step can be taken back to."""

    def metrics(self, optimizer: OptimizerConfig) -> dict[str, float]:
        found = {"learner/rate_share": self.rate_share} if optimizer.ess_scaling or optimizer.signal_scaling else {}
        if self.objective.min_kept_frac is not None and self.bounds.k3_gate is not None:
            found["gspo/k3_gate"] = self.bounds.k3_gate
        if self.objective.clip_spread is not None:
            found |= {"gspo/clip_low": self.objective.clip_low, "gspo/clip_high": self.objective.clip_high}
        return found
