"""When a job ends before its last step, and when one that stands still or falls is taken in hand, as its user says.

One rule: a condition that is left out never acts. It compares nothing (the trainer does).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from gspo_core.documented import Documented

PositiveInt = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Series = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./:-]+$", max_length=128)]


class RewardTarget(Documented):
    """A reward that is good enough."""

    at_least: Finite
    """The value to reach."""
    series: Series = "reward/mean"
    """The metric to watch: `reward/mean` of each step, or `eval/reward/mean` of each evaluation."""
    times: PositiveInt = 3
    """Number of values in a row that must reach it."""


class NoProgress(Documented):
    """A series that no longer rises."""

    values: PositiveInt
    """Number of values in a row without a new best one."""
    series: Series = "reward/mean"
    """The metric to watch; a step (or evaluation) without a value does not count."""
    min_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """A new best value must exceed the best so far by more than this."""


class StopSpec(Documented):
    """What ends a job early. The job has then succeeded, and its status names the condition."""

    reward: RewardTarget | None = None
    """End when the reward is good enough."""
    no_progress: NoProgress | None = None
    """End when the reward no longer rises."""
    wall_time_s: Seconds | None = None
    """End at the first step boundary this long after the job began to run, pauses included."""


SLOW_BY = 0.5


class WatchdogSpec(Documented):
    """What happens to a run without progress (no step finishes and no segment of an episode arrives), and to one that
    loses what it had learned."""

    alarm_s: Seconds | None = 900.0
    """Time without progress that raises an alarm. Null: never."""
    end_s: Seconds | None = 3600.0
    """Time without progress that ends the attempt; another one continues from the checkpoint, and this one counts as a
    lost trainer. It must exceed the time that the longest step takes to train. Null: never."""
    # Release 0.2.0 does not know these keys and refuses a job with them, so a job that does not use them is stored
    # without.
    on_fall: Literal["tell", "slow", "go_back"] = Field(default="tell", exclude_if=lambda action: action == "tell")
    """What follows the alarm `evaluation_fell`: a held-out reward is below the best one by more than chance. `tell`:
    nothing else. `slow`: the learning rate becomes smaller. `go_back`: that, and the job goes on from the checkpoint of
    its best evaluation; each evaluation then makes a checkpoint, and that of the best one is kept."""
    slow_by: Annotated[float, Field(gt=0, lt=1)] = Field(default=SLOW_BY, exclude_if=lambda factor: factor == SLOW_BY)
    """With `slow` and `go_back`: the learning rate is multiplied by this, each time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.on_fall == "tell" and self.slow_by != SLOW_BY:
            raise ValueError("slow_by: only acts with on_fall: slow or go_back; set one of them or remove it")
        if self.alarm_s is not None and self.end_s is not None and self.end_s < self.alarm_s:
            raise ValueError(f"end_s ({self.end_s:g}) is below alarm_s ({self.alarm_s:g}): nobody would be warned")
        return self
