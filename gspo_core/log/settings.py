"""Holds the settings of a step: the submitted ones plus later changes by the user.

Rule: settings change only between two steps, and the batch log of each step records them, so a replayed step uses the
same ones. ``gspo_core.live_settings`` decides which settings may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gspo_core.learner_config import LearnerConfig
from gspo_core.live_settings import tuned
from gspo_core.log.batches import LoggedSettings
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.spec import JobSpec


class Tunable(Protocol):
    def retune(self, config: LearnerConfig, objective: ObjectiveConfig) -> None: ...


def learner_config(spec: JobSpec) -> LearnerConfig:
    return LearnerConfig(
        optimizer=spec.training_optimizer,
        total_steps=spec.steps,
        longest_sequence=spec.longest_sequence,
        publishes_adapter=spec.rollout.weight_transport == "adapter",
        **dict(spec.learner),
    )


class Tuning:
    """The current settings, starting from the submitted specification."""

    def __init__(self, submitted: JobSpec) -> None:
        self._submitted = submitted
        self._values: Mapping[str, Any] = {}
        self.spec = submitted
        self.version = 0
        """Number of changes applied."""

    def logged(self) -> LoggedSettings:
        """Return the settings to record in the batch log of a step."""
        return {"version": self.version, "values": dict(self._values)}

    def recall(self, learner: Tunable, logged: LoggedSettings) -> None:
        """Restore the settings logged with a step; logs older than live settings contain none."""
        self.apply(learner, int(logged.get("version", 0)), logged.get("values", {}))

    def apply(self, learner: Tunable, version: int, values: Mapping[str, Any]) -> bool:
        """Apply ``values`` and return whether anything changed."""
        self.version = version
        if values == self._values:
            return False
        self.spec = tuned(self._submitted, values)
        self._values = dict(values)
        learner.retune(learner_config(self.spec), self.spec.training_objective)
        return True
