"""When a job ends before its last step, and when one that stands still is taken in hand: as its user writes it.

One rule: a condition that is left out never acts. It compares nothing (the trainer does).
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from gspo_core.documented import Documented

PositiveInt = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Series = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./:-]+$", max_length=128)]


class RewardTarget(Documented):
    """A reward that is good enough."""

    at_least: Finite
    """The value that is wanted."""
    series: Series = "reward/mean"
    """The metric that is looked at: `reward/mean` of each step, or `eval/reward/mean` of each evaluation."""
    times: PositiveInt = 3
    """So many values in a row must reach it."""


class NoProgress(Documented):
    """A series that rises no more."""

    values: PositiveInt
    """So many values in a row without a new best one."""
    series: Series = "reward/mean"
    """The metric that is looked at; a step (or evaluation) that has no such value does not count."""
    min_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """A new best value lies more than this above the best one so far."""


class StopSpec(Documented):
    """What ends a job early. It has succeeded then, and its status names the condition."""

    reward: RewardTarget | None = None
    """End when the reward is good enough."""
    no_progress: NoProgress | None = None
    """End when the reward rises no more."""
    wall_time_s: Seconds | None = None
    """End at the first step boundary so long after the job began to run, pauses included."""


class WatchdogSpec(Documented):
    """What happens to a run in which nothing moves: no step ends and no piece of an episode arrives."""

    alarm_s: Seconds | None = 900.0
    """So long without any movement raises an alarm. Null: never."""
    end_s: Seconds | None = 3600.0
    """So long ends the attempt; another one goes on from the checkpoint, and it counts like the loss of a trainer.
    It must be more than the longest step takes to train. Null: never."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.alarm_s is not None and self.end_s is not None and self.end_s < self.alarm_s:
            raise ValueError(f"end_s ({self.end_s:g}) lies before alarm_s ({self.alarm_s:g}): nobody would be warned")
        return self
