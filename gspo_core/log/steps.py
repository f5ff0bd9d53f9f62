"""Training a logged step, for the first time or again: its settings, its sequences, and what became of each group.

The rule: a step is trained with exactly the data, token ages and settings that its batch log holds, so that it gives
the same weights. Pure but for the learner that it is handed; which steps come when is ``history``'s to say.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gspo_core.log.batches import LoggedBatch, require_whole
from gspo_core.log.lineage import Lineage
from gspo_core.log.sequences import TrainBatch, data_metrics, train_batch
from gspo_core.log.settings import Tunable, Tuning
from gspo_core.objective_config import AdvantageConfig
from gspo_core.spec import JobSpec


class StepLearner(Tunable, Protocol):
    """The part of a learner that trains a step."""

    def logged_step(self, batch: LoggedBatch) -> tuple[TrainBatch, dict[str, float]]: ...


def train_again(learner: StepLearner, lineage: Lineage, batch: LoggedBatch, tuning: Tuning) -> dict[str, float]:
    """Train the step of ``batch`` and note in ``lineage`` what became of its groups; returns what it reports, without
    what only clocks and engines know.

    Raises ErasedStep.
    """
    require_whole(batch)
    tuning.recall(learner, batch.extra.get("settings", {}))
    _, metrics = train_on(learner, batch, tuning.spec)
    settle(lineage, batch)
    return metrics | {"settings/version": float(tuning.version)}


def train_on(learner: StepLearner, batch: LoggedBatch, spec: JobSpec) -> tuple[TrainBatch, dict[str, float]]:
    """Take the step of ``batch`` with the settings that the learner has: the one way in which a step is trained, for
    the first time or again. Returns its input, and what it reports. Raises ErasedStep."""
    train, metrics = learner.logged_step(batch)
    return train, data_metrics(train, batch.groups, spec.rollout.staleness_cap) | metrics


def logged_sequences(batch: LoggedBatch, config: AdvantageConfig) -> TrainBatch:
    """The training input of the step, with tokens as old as they were. Raises ErasedStep."""
    require_whole(batch)
    ages = batch.extra["staleness"]

    def staleness_of(versions: NDArray[np.int32]) -> NDArray[np.int32]:
        found, places = np.unique(versions, return_inverse=True)
        return np.array([ages[str(version)] for version in found.tolist()], dtype=np.int32)[places]

    late, cap = batch.extra.get("late", ()), batch.extra.get("late_cap", 0)
    keep_groups = batch.extra.get("dealing") == "groups"
    return train_batch(batch.groups, staleness_of, config, late, cap, keep_groups=keep_groups)


def settle(lineage: Lineage, batch: LoggedBatch) -> None:
    dropped = [group for groups in batch.extra["dropped"].values() for group in groups]
    lineage.step = batch.step
    lineage.num_published += len(batch.groups)
    lineage.num_dropped += len(dropped)
    lineage.num_dispatched = max(lineage.num_dispatched, batch.extra["num_dispatched"])
    lineage.settle([*(group.group for group in batch.groups), *dropped])
