"""A clip that is as wide as updates were measured to spread sequences.

One rule: a step's width follows from earlier steps alone, so that neither micro-batches nor ranks nor its own updates
change it. It only widens, both sides by the same factor. It measures no spread (`gspo_core.objective.metrics` does) and
clips nothing (`gspo_core.objective.losses` does).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gspo_core.objective_config import MAX_SPREAD_CLIP_LOW, ObjectiveConfig

# Long enough that no odd batch decides the width, short enough to follow a learning rate that falls.
MEMORY_STEPS = 10


@dataclass(frozen=True)
class SpreadMemory:
    """The running mean of `gspo/log_ratio_std` over steps that were trained."""

    total: float = 0.0
    """Sum of the spreads, each weighted by how recent it is."""
    weight: float = 0.0
    """Sum of those weights; 0 before the first."""

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def after(self, spread: float | None) -> SpreadMemory:
        """With one step more; as it was, where that step could not be measured."""
        if spread is None or not math.isfinite(spread):
            return self
        kept = 1 - 1 / MEMORY_STEPS
        return SpreadMemory(kept * self.total + spread, kept * self.weight + 1)


def widened_clip(config: ObjectiveConfig, spread: float | None) -> ObjectiveConfig:
    """The objective with the clip of a step, by the mean spread of those before it; None before the first."""
    if config.clip_spread is None or spread is None:
        return config
    low = max(config.clip_low, min(MAX_SPREAD_CLIP_LOW, config.clip_spread * spread))
    return config.model_copy(update={"clip_low": low, "clip_high": config.clip_high * (low / config.clip_low)})
