"""Replays logged steps that no checkpoint contains, from the batch logs alone, without Redis or engines.

Rule: replay a step with exactly its logged data, token ages and settings, so that it yields the same weights and
published results stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from gspo_core.log.lineage import Lineage
from gspo_core.staleness import Position
from services.files.batch_log import BatchLog, DamagedBatchLog, LoggedBatch, UnknownLogSchema, batches_after
from services.process.telemetry import get_logger
from services.trainer.groups.sequences import train_batch
from services.trainer.groups.step_settings import Tuning
from services.trainer.ranks.learner import AnyLearner


def replay(
    learner: AnyLearner,
    lineage: Lineage,
    start: Position,
    log: BatchLog,
    forks: Mapping[int, Position],
    tuning: Tuning,
    trained: Callable[[Position], None] = lambda _: None,
) -> tuple[Position, str | None]:
    """Train the logged steps after checkpoint ``start``; return the last position and any problem that cut it short.

    ``forks`` maps each started epoch to its fork position. A damaged log ends the replay: the groups of that step and
    later ones are owed again. Calls ``trained`` after every step. Raises UnknownLogSchema.
    """
    for position in batches_after(start, log.steps(), max(forks, default=start.epoch), forks):
        try:
            batch = log.read(position.epoch, position.step)
        except UnknownLogSchema:
            raise
        except DamagedBatchLog as error:
            return start, str(error)
        train_again(learner, lineage, batch, tuning)
        get_logger().info("step replayed", epoch=position.epoch, step=position.step)
        trained(position)
        start = position
    return start, None


def train_again(learner: AnyLearner, lineage: Lineage, batch: LoggedBatch, tuning: Tuning) -> None:
    tuning.recall(learner, batch.extra.get("settings", {}))
    ages = batch.extra["staleness"]

    def staleness_of(versions: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.array([ages[str(version)] for version in versions.tolist()], dtype=np.int32)

    learner.step(train_batch(batch.groups, staleness_of, tuning.spec.objective.advantage).sequences)
    dropped = [group for groups in batch.extra["dropped"].values() for group in groups]
    lineage.step = batch.step
    lineage.num_published += len(batch.groups)
    lineage.num_dropped += len(dropped)
    lineage.num_dispatched = max(lineage.num_dispatched, batch.extra["num_dispatched"])
    lineage.settle([*(group.group for group in batch.groups), *dropped])
