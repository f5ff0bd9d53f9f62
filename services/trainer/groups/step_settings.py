"""The settings that hold for a step: those that the job was submitted with, and what was changed since.

The rule kept here: what holds changes between two steps and nowhere else, and is written into the batch log of the
step, so that a step that is trained again is trained with the same. Which settings may change is decided in
``gspo_core.live_settings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gspo_core.learner_config import LearnerConfig
from gspo_core.live_settings import tuned
from gspo_core.log.batches import LoggedSettings
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.spec import JobSpec
from services.process.telemetry import get_logger


class Tunable(Protocol):
    def retune(self, config: LearnerConfig, objective: ObjectiveConfig) -> None: ...


def learner_config(spec: JobSpec) -> LearnerConfig:
    return LearnerConfig(optimizer=spec.optimizer, total_steps=spec.steps, **dict(spec.learner))


class Tuning:
    """What holds now. Starts with the submitted specification."""

    def __init__(self, submitted: JobSpec) -> None:
        self._submitted = submitted
        self._values: Mapping[str, Any] = {}
        self.spec = submitted
        self.version = 0
        """How many changes are in it."""

    def logged(self) -> LoggedSettings:
        """For the batch log of a step."""
        return {"version": self.version, "values": dict(self._values)}

    def recall(self, learner: Tunable, logged: LoggedSettings) -> None:
        """What held when the step was logged. Logs of before there were live settings say nothing."""
        self.apply(learner, int(logged.get("version", 0)), logged.get("values", {}))

    def apply(self, learner: Tunable, version: int, values: Mapping[str, Any]) -> bool:
        """Whether something changes with it."""
        self.version = version
        if values == self._values:
            return False
        self.spec = tuned(self._submitted, values)
        self._values = dict(values)
        learner.retune(learner_config(self.spec), self.spec.training_objective)
        get_logger().info("settings", version=version, values=self._values)
        return True
