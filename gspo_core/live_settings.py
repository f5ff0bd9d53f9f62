"""Which settings of a job may change while it runs, and what the job is with such changes.

One rule: a setting is live only if it acts between two steps and on what the trainer alone decides. What other
processes have read already, what has a shape, and what groups under way were started for is refused with the reason.
It stores nothing and applies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError

from gspo_core.json_value import JSON
from gspo_core.learner_config import LIVE_RATES
from gspo_core.objective_config import OTHER_KEYS, ObjectiveConfig
from gspo_core.problems import Problem, near, problems
from gspo_core.spec import JobSpec

LIVE_SETTINGS = frozenset(
    {
        *(f"optimizer.{name}" for name in LIVE_RATES),
        *(f"objective.{name}" for name in ("clip_low", "clip_high", "dual_clip", "correction_min", "correction_max")),
        *(f"objective.{name}" for name in ("k3_gate", "outlier_gate", "off_policy_gate")),
        *(f"objective.{name}" for name in ("geometric_gate", "geometric_gate_low")),
        *(
            f"objective.{name}"
            for name in ("min_kept_frac", "m2_bound", "stale_clip", "clip_spread", "prefix_threshold", "prefix_memory")
        ),
        *(f"objective.{name}" for name in ("gmpo_clip", "dppo_delta", "dppo_cap")),
        *(f"rollout.{name}" for name in ("max_staleness", "staleness_cap", "on_stale", "stale_wait_s")),
        *("steps", "checkpoint_every", "evaluation.every"),
        *("checkpoints.keep", "checkpoints.keep_every", "checkpoints.keep_versions", "checkpoints.keep_batches"),
        *("stop.reward", "stop.no_progress", "stop.wall_time_s", "watchdog.alarm_s", "watchdog.end_s"),
        *("watchdog.on_fall", "watchdog.slow_by"),
    }
)

_GATE, _LOW_END = "objective.geometric_gate", "objective.geometric_gate_low"
_FIXED = "is fixed for the life of a job; submit another one"
# The longest beginning of a key decides.
_REASONS: Mapping[str, str] = {
    "": _FIXED,
    "groups_per_step": "is the unit of admission, and groups in flight were started for it",
    "rollout": "was read by the rollout workers when they took the job",
    "sampling": "was read by the rollout workers when they took the job",
    "limits": "was read by the rollout workers when they took the job",
    "environments": "was read by the rollout workers when they took the job",
    "chat": "was read by the rollout workers when they took the job",
    "optimizer": "is part of the optimizer's state; submit another job",
    "learner": "determines how the model is loaded; submit another job",
    "objective": "determines the loss; submit another job",
    "objective.staleness_cap": "follows rollout.staleness_cap; set it there",
    "objective.clip": "is set through objective.clip_low and objective.clip_high",
    "evaluation": "determines which held-out episodes are compared with each other",
}


class ChangeRefused(ValueError):
    """The changes cannot be made; ``problems`` says why."""

    def __init__(self, found: list[Problem]) -> None:
        super().__init__("; ".join(one.message for one in found))
        self.problems = found


def live_values(changes: Mapping[str, JSON]) -> dict[str, JSON]:
    """Changes that are written like a part of a job, by their key: ``{"optimizer.lr": 1e-6}``. Raises ChangeRefused."""
    values = dict(_flat(changes, ""))
    refused = [problem for key in values if (problem := _problem(key)) is not None]
    if not values:
        refused = [Problem("missing_field", (), "there is nothing to change")]
    if refused:
        raise ChangeRefused(refused)
    gate = values.get(_GATE)
    if isinstance(gate, list | tuple) and len(gate) == 2 and _LOW_END not in values:
        values[_LOW_END], values[_GATE] = gate
    return values


def merged(spec: JobSpec, settings: Mapping[str, JSON], wanted: Mapping[str, JSON]) -> dict[str, JSON]:
    """The live settings of a job with new ones. A number as `geometric_gate` stands for both ends, so no lower end
    of before stays beside it."""
    values = {**settings, **wanted}
    has_low_end = _LOW_END in settings or spec.objective.geometric_gate_low is not None
    if _GATE in wanted and _LOW_END not in wanted and has_low_end:
        values[_LOW_END] = None
    return values


def tuned(spec: JobSpec, values: Mapping[str, JSON]) -> JobSpec:
    """The job with live settings in place of its own. Raises ChangeRefused for values that it cannot have."""
    if not values:
        return spec
    data = spec.model_dump(mode="json")
    for key, value in values.items():
        *sections, name = key.split(".")
        place = data
        for section in sections:
            if place[section] is None:
                raise ChangeRefused([Problem("validation_failed", (key,), f"{key}: the job has no {section}")])
            place = place[section]
        place[name] = value
    try:
        changed = JobSpec.model_validate(data)
    except ValidationError as error:
        raise ChangeRefused(problems(error, JobSpec, data)) from error
    if spec.rollout.max_staleness and not changed.rollout.max_staleness:
        raise ChangeRefused([_synchronous()])
    return changed


def _flat(changes: Mapping[str, JSON], before: str) -> Iterator[tuple[str, JSON]]:
    for name, value in changes.items():
        key = f"{before}.{name}" if before else name
        if isinstance(value, Mapping) and key not in LIVE_SETTINGS:
            if not value:
                yield key, value
            yield from _flat(value, key)
        else:
            yield key, value


def _problem(key: str) -> Problem | None:
    if key in LIVE_SETTINGS:
        return None
    section = key
    while section and section not in _REASONS:
        section = section.rpartition(".")[0]
    path = tuple(key.split("."))
    if not is_setting(path):
        return Problem("unknown_field", path, f"{key} is not a setting of a job{near(key, LIVE_SETTINGS)}")
    return Problem("not_live", path, f"{key} cannot change while the job runs: it {_REASONS[section]}")


def is_setting(path: Sequence[str]) -> bool:
    """Whether a job has a setting of this name, live or not."""
    model: type[BaseModel] | None = JobSpec
    for name in path:
        if model is None:  # below a single value: its section has the reason
            return True
        if name not in model.model_fields:
            return model is ObjectiveConfig and name in OTHER_KEYS
        model = next(iter(_models(model.model_fields[name].annotation)), None)
    return True


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _synchronous() -> Problem:
    message = "rollout.max_staleness: 0 promises that nothing is ever sampled with old weights, but much already was"
    return Problem("not_live", ("rollout", "max_staleness"), message)
