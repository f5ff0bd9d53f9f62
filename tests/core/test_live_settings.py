"""What of a job may change while it runs, and that nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from gspo_core.live_settings import LIVE_SETTINGS, ChangeRefused, live_values, merged, tuned
from gspo_core.spec import JobSpec

SPEC = JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}], "evaluation": {"every": 5}})


def at(spec: JobSpec, key: str) -> Any:
    value: Any = spec
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_every_live_setting_is_one_of_a_job() -> None:
    for key in LIVE_SETTINGS:
        at(SPEC, key)


def test_changes_are_written_like_a_part_of_a_job_and_nothing_else_changes() -> None:
    values = live_values({"optimizer": {"lr": 0.5}, "steps": 7, "objective": {"k3_gate": None}})
    assert values == {"optimizer.lr": 0.5, "steps": 7, "objective.k3_gate": None}
    changed = tuned(SPEC, values)
    assert [at(changed, key) for key in values] == [0.5, 7, None]
    undone = {"optimizer.lr": SPEC.optimizer.lr, "steps": SPEC.steps, "objective.k3_gate": SPEC.objective.k3_gate}
    assert tuned(changed, undone) == SPEC


def test_a_whole_condition_is_one_setting() -> None:
    values = live_values({"stop": {"reward": {"at_least": 0.9}}})
    assert tuned(SPEC, values).stop.reward is not None
    assert tuned(tuned(SPEC, values), live_values({"stop": {"reward": None}})) == SPEC


NARROW = {"geometric_gate": 1.002, "geometric_gate_low": 0.999}


@pytest.mark.parametrize("submitted", [{}, {"geometric_gate": 1.1}, {"geometric_gate": [0.9, 1.02]}], ids=str)
@pytest.mark.parametrize("earlier", [{}, {"geometric_gate": [0.8, 1.3]}, {"geometric_gate": 1.2}], ids=str)
@pytest.mark.parametrize(
    ("change", "ends"),
    [
        ({"geometric_gate": [0.999, 1.002]}, (0.999, 1.002)),
        ({"geometric_gate": 1.5}, (None, 1.5)),
        ({"geometric_gate": None}, (None, None)),
        (NARROW, (0.999, 1.002)),
    ],
    ids=str,
)
def test_a_gate_is_what_the_change_says_whatever_ends_there_were(
    submitted: dict[str, Any], earlier: dict[str, Any], change: dict[str, Any], ends: tuple[float | None, float | None]
) -> None:
    """The lower end of before stayed beside a number, and contradicted a pair."""
    spec, settings = JobSpec.model_validate(SPEC.model_dump() | {"objective": submitted}), dict[str, Any]()
    for one in (earlier, change):
        settings = merged(spec, settings, live_values({"objective": one} if one else {"steps": 7}))
    changed = tuned(spec, settings).objective
    assert (changed.geometric_gate_low, changed.geometric_gate) == ends
    assert merged(spec, settings, live_values({"objective": change})) == settings, "it holds already"


def test_one_end_of_a_gate_leaves_the_other_and_two_that_differ_are_refused() -> None:
    spec = JobSpec.model_validate(SPEC.model_dump() | {"objective": {"geometric_gate": [0.9, 1.02]}})
    changed = tuned(spec, merged(spec, {}, live_values({"objective": {"geometric_gate_low": 0.95}})))
    assert (changed.objective.geometric_gate_low, changed.objective.geometric_gate) == (0.95, 1.02)
    with pytest.raises(ChangeRefused, match="contradicts geometric_gate"):
        tuned(spec, live_values({"objective": {"geometric_gate": [0.9, 1.1], "geometric_gate_low": 0.95}}))


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"groups_per_step": 3}, "not_live", "admission"),
        ({"sampling": {"temperature": 2.0}}, "not_live", "rollout workers"),
        ({"optimizer": {"betas": [0.9, 0.9]}}, "not_live", "optimizer's state"),
        ({"objective": {"minibatches": 2}}, "not_live", "determines the loss"),
        ({"objective": {"clip": 0.1}}, "not_live", "clip_low"),
        ({"objective": {"staleness_cap": 3}}, "not_live", "rollout.staleness_cap"),
        ({"rollout": {"max_staleness": 0}}, "not_live", "old weights"),
        ({"seed": 3}, "not_live", "submit another"),
        ({"optimizer": {}}, "not_live", "optimizer"),
        ({"optimiser": {"lr": 1}}, "unknown_field", "not a setting"),
        ({"optimizer": {"learning_rate": 1}}, "unknown_field", "not a setting"),
        ({"stop": {"rewards": {"at_least": 1}}}, "unknown_field", "stop.reward"),
        ({"objective": {"name": "gmpo"}}, "not_live", "determines the loss"),
        ({"objective": {"clip_spread": 5, "clip_low": 0.2}}, "validation_failed", "a clip_low below"),
        ({"optimizer": {"lr": -1}}, "validation_failed", "greater than or equal to 0"),
        ({"optimizer": {"lr": "NaN"}}, "validation_failed", "finite"),
        ({"rollout": {"staleness_cap": 1}}, "validation_failed", "max_staleness"),
        ({}, "missing_field", "nothing"),
    ],
)
def test_all_else_is_refused_with_the_reason(changes: dict[str, Any], code: str, word: str) -> None:
    with pytest.raises(ChangeRefused) as refused:
        tuned(SPEC, live_values(changes))
    (problem,) = refused.value.problems
    assert (problem.code, word in problem.message) == (code, True), problem


def test_a_section_that_a_job_has_not_cannot_be_tuned() -> None:
    with pytest.raises(ChangeRefused, match="has no evaluation"):
        tuned(SPEC.model_copy(update={"evaluation": None}), {"evaluation.every": 3})
