"""What is asked of logged steps that are trained again: which ones, and what is to be different.

The rule: a question says all that its answer depends on beside the past itself, and comes back from its record as it
was. It is light: asking needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from gspo_core.json_value import JSON
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.changes import ImpossibleChange, Without, changed_spec, idle_settings, missing
from gspo_core.position import Position
from gspo_core.replay.past import Past
from gspo_core.spec import JobSpec


@dataclass(frozen=True)
class ReplayQuestion:
    """What is asked of the steps ``first`` to ``last``."""

    first: int
    last: int
    settings: Mapping[str, JSON] = field(default_factory=dict)
    without: Without = field(default_factory=Without)
    single: tuple[int, int] | None = None
    """Group and member of an episode whose tokens are to be shown."""
    influence: bool = False
    """Train the steps once more for each of their groups, with its advantages 0."""

    @property
    def changes(self) -> bool:
        return bool(self.settings or self.without)

    def checked(self, spec: JobSpec, batches: Sequence[LoggedBatch]) -> JobSpec:
        """The job as the steps of ``batches`` are trained otherwise. Raises ImpossibleChange."""
        if idle := idle_settings(self.settings):
            raise ImpossibleChange(
                f"{', '.join(idle)}: no step that is trained again reads it, for its data are there already; fork the "
                "job to sample with it"
            )
        if absent := [*missing(self.without, batches)]:
            raise ImpossibleChange(f"{', '.join(absent)}: not in the batch of these steps")
        return changed_spec(spec, self.settings)

    def record(self) -> dict[str, JSON]:
        return {
            "first": self.first,
            "last": self.last,
            "set": dict(self.settings),
            "without": list(self.without.said),
            "single": None if self.single is None else f"{self.single[0]}/{self.single[1]}",
            "influence": self.influence,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Raises ImpossibleChange."""
        return cls(
            record["first"],
            record["last"],
            settings=record["set"],
            without=Without.parse(record["without"]),
            single=parse_episode(record["single"]),
            influence=record["influence"],
        )


@dataclass(frozen=True)
class ReplaySteps:
    """What it takes to answer a question."""

    start: Position | None
    """The checkpoint that it begins with; None: the base model."""
    replayed: int
    """Steps that are trained again to get to the first one asked for."""
    trained: int
    """Steps that are trained in all."""
    epochs: tuple[int, ...]
    """The epochs of the steps asked for."""


def plan(past: Past, question: ReplayQuestion) -> ReplaySteps:
    """Raises PastError, ImpossibleChange; otherwise the past has everything that the replay needs."""
    batches = [past.whole_batch(step) for step in range(question.first, question.last + 1)]
    question.checked(past.spec, batches)
    if question.single is not None and question.single not in {
        (one.key.group, one.key.member) for batch in batches for one in batch.trajectories
    }:
        raise ImpossibleChange("episode {}/{} is not in the batch of these steps".format(*question.single))
    start, num_replayed = past.journey_to(question.first - 1)
    num_groups = sum(len(batch.groups) for batch in batches) if question.influence else 0
    times = 1 + question.changes + num_groups
    return ReplaySteps(
        start, num_replayed, num_replayed + times * len(batches), tuple(batch.epoch for batch in batches)
    )


def parse_episode(text: str | None) -> tuple[int, int] | None:
    """Raises ImpossibleChange."""
    if text is None:
        return None
    found = Without.parse([text]).episodes
    if not found:
        raise ImpossibleChange(f"{text}: an episode is GROUP/MEMBER")
    return next(iter(found))
