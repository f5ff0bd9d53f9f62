"""A learner of which every rank holds a part, behind the calls of a whole one.

The rule kept here: what is asked of it on the first rank is announced to the others before the first rank takes part,
and once it is built no rank holds the model whole. It decides nothing about when.
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
from gspo_core.objective import Alarm
from gspo_core.objective_config import ObjectiveConfig
from services.trainer.ranks.calls import (
    STATE,
    WEIGHTS,
    Build,
    Close,
    Keep,
    Load,
    Logprobs,
    Prepare,
    Retune,
    Step,
    Write,
    to_wire,
)
from services.trainer.ranks.followers import Followers
from services.trainer.ranks.lines import Place


class Written(Protocol):
    """A copy that can be written."""

    def write(self, directory: Path) -> None: ...


class AnyLearner(Protocol):
    """What the trainer asks of a learner, on one rank or several."""

    @property
    def alarms(self) -> list[Alarm]: ...
    @property
    def trained_logprobs(self) -> list[NDArray[np.float32]]: ...
    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]: ...
    def retune(self, config: LearnerConfig, objective: ObjectiveConfig) -> None: ...
    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]: ...
    def copy_weights(self) -> Written: ...
    def copy_state(self) -> Written: ...
    def load_state(self, directory: Path) -> None: ...
    def close(self) -> None: ...


class RankedCopy:
    """Of weights or of a state; each rank keeps its share of it."""

    def __init__(self, followers: Followers, kind: str, number: int, own: Copy) -> None:
        self._followers, self._kind, self._number, self._own = followers, kind, number, own

    def write(self, directory: Path) -> None:
        call = Write(self._number, str(directory))
        self._followers.write(self._kind, call, lambda: self._own.write_share(directory))
        self._own.complete(directory)


class RankedLearner:
    """Only on the first rank. Its calls may come from any thread, one after the other."""

    def __init__(
        self,
        followers: Followers,
        place: Place,
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
        """Copies that nobody here holds any more."""
        self._own: Learner
        call = Build(str(model_dir), _bytes(config), _bytes(objective), seed, device)

        def build() -> None:
            self._own = Learner(model_dir, config, objective, seed=seed, device=place.enter(device))

        followers.run(call, build)

    @property
    def alarms(self) -> list[Alarm]:
        return self._own.alarms

    @property
    def trained_logprobs(self) -> list[NDArray[np.float32]]:
        return self._own.trained_logprobs

    def step(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        return self._followers.run(Step(to_wire(sequences)), lambda: self._own.step(sequences))

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[NDArray[np.float32]]:
        return self._followers.run(Logprobs(to_wire(sequences)), lambda: self._own.logprobs(sequences))

    def retune(self, config: LearnerConfig, objective: ObjectiveConfig) -> None:
        call = Retune(_bytes(config), _bytes(objective))
        self._followers.run(call, lambda: self._own.retune(config, objective))

    def copy_weights(self) -> RankedCopy:
        return self._copy(WEIGHTS)

    def copy_state(self) -> RankedCopy:
        return self._copy(STATE)

    def load_state(self, directory: Path) -> None:
        """All ranks or none: first each reads and checks its share."""
        prepared: list[Callable[[], None]] = []

        def prepare() -> None:
            prepared.append(self._own.prepare_state(directory))

        self._followers.run(Prepare(str(directory)), prepare, together=False)
        self._followers.run(Load(), lambda: prepared[0]())

    def close(self) -> None:
        """Returns at once; what is under way is finished first."""

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
