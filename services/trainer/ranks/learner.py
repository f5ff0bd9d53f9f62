"""A learner sharded over all ranks, behind the interface of a whole one.

Rule: the first rank announces each call to the others before taking part itself, and once built, no rank holds the
whole model. It does not decide when to do anything.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gspo_core.batch import TrainSequence
from gspo_core.learner import Copy, Learner
from gspo_core.learner_config import LearnerConfig
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.sequences import TrainBatch
from gspo_core.log.steps import logged_sequences
from gspo_core.objective import Alarm
from gspo_core.objective_config import ObjectiveConfig
from services.files.job_dir import JobDir
from services.trainer.ranks.calls import (
    STATE,
    WEIGHTS,
    Build,
    Close,
    Keep,
    Load,
    Logprobs,
    Prepare,
    ReadStep,
    Retune,
    Step,
    Write,
    to_wire,
)
from services.trainer.ranks.followers import Followers
from services.trainer.ranks.lines import RankPlace


class Written(Protocol):
    """A copy that can be written."""

    def write(self, directory: Path) -> None: ...


class AnyLearner(Protocol):
    """What the trainer needs of a learner, on one rank or several."""

    @property
    def alarms(self) -> list[Alarm]: ...
    @property
    def trained_logprobs(self) -> list[NDArray[np.float32]]: ...
    def logged_step(self, batch: LoggedBatch) -> tuple[TrainBatch, dict[str, float]]: ...
    def retune(self, config: LearnerConfig, objective: ObjectiveConfig) -> None: ...
    def logprobs(
        self, sequences: Sequence[TrainSequence], *, sampled_only: bool = False
    ) -> list[NDArray[np.float32]]: ...
    def copy_weights(self) -> Written: ...
    def copy_state(self) -> Written: ...
    def load_state(self, directory: Path) -> None: ...
    def close(self) -> None: ...


class RankedCopy:
    """A copy of weights or state; each rank keeps its share."""

    def __init__(self, followers: Followers, kind: str, number: int, own: Copy) -> None:
        self._followers, self._kind, self._number, self._own = followers, kind, number, own

    def write(self, directory: Path) -> None:
        call = Write(self._number, str(directory))
        self._followers.write(self._kind, call, lambda: self._own.write_share(directory))
        self._own.complete(directory)


class RankedLearner:
    """First rank only. Call from any thread, one call at a time."""

    def __init__(
        self,
        followers: Followers,
        place: RankPlace,
        job: JobDir,
        model_dir: Path,
        config: LearnerConfig,
        objective: ObjectiveConfig,
        *,
        seed: int,
        device: str,
    ) -> None:
        self._followers = followers
        self._numbers = itertools.count()
        self._dropped: list[int] = []
        """Copies no longer referenced here."""
        self._own: Learner
        call = Build(str(job.path), str(model_dir), _bytes(config), _bytes(objective), seed, device)

        def build() -> None:
            self._own = Learner(model_dir, config, objective, seed=seed, device=place.enter(device))

        followers.run(call, build)

    @property
    def alarms(self) -> list[Alarm]:
        return self._own.alarms

    @property
    def trained_logprobs(self) -> list[NDArray[np.float32]]:
        return self._own.trained_logprobs

    def logged_step(self, batch: LoggedBatch) -> tuple[TrainBatch, dict[str, float]]:
        """``batch`` is in the job's batch log, where the others read it before any rank trains. Raises ErasedStep."""
        advantage = self._own.objective.advantage
        train = self._followers.run(ReadStep(batch.epoch, batch.step), lambda: logged_sequences(batch, advantage))
        return train, self._followers.run(Step(), lambda: self._own.step(train.sequences))

    def logprobs(self, sequences: Sequence[TrainSequence], *, sampled_only: bool = False) -> list[NDArray[np.float32]]:
        call = Logprobs(to_wire(sequences), sampled_only)
        return self._followers.run(call, lambda: self._own.logprobs(sequences, sampled_only=sampled_only))

    def retune(self, config: LearnerConfig, objective: ObjectiveConfig) -> None:
        call = Retune(_bytes(config), _bytes(objective))
        self._followers.run(call, lambda: self._own.retune(config, objective))

    def copy_weights(self) -> RankedCopy:
        return self._copy(WEIGHTS)

    def copy_state(self) -> RankedCopy:
        return self._copy(STATE)

    def load_state(self, directory: Path) -> None:
        """All ranks or none: each reads and checks its share first."""
        prepared: list[Callable[[], None]] = []

        def prepare() -> None:
            prepared.append(self._own.prepare_state(directory))

        self._followers.run(Prepare(str(directory)), prepare, together=False)
        self._followers.run(Load(), lambda: prepared[0]())

    def close(self) -> None:
        """Returns at once; work in progress finishes first."""

        def drop() -> None:
            del self._own

        self._followers.send(Close(), drop)

    def _copy(self, kind: str) -> RankedCopy:
        number, dropped = next(self._numbers), self._dropped[:]
        del self._dropped[: len(dropped)]
        call = Keep(kind, number, dropped)
        made = self._followers.run(call, self._own.copy_weights if kind == WEIGHTS else self._own.copy_state)
        copy = RankedCopy(self._followers, kind, number, made)
        weakref.finalize(copy, self._dropped.append, number)
        return copy


def _bytes(config: LearnerConfig | ObjectiveConfig) -> bytes:
    return config.model_dump_json().encode()
