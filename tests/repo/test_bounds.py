"""What was measured is compared with a bound by `gspo_core.bounds` alone, which says what becomes of NaN."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from gspo_core.bounds import NotANumber, exceeds, falls_below, reaches
from gspo_core.objective import AlarmKind
from gspo_core.objective.alarms import group_alarms
from gspo_core.spec import JobSpec

ROOT = Path(__file__).parents[2]
ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# Tensors: what is trained was checked to be finite, and gates keep only what is within (`<=`).
TENSOR = ("_BT", "_B", "_N")
# File and name of the bound -> why no NaN can be on the other side.
_TRAINED = "tensors of log-probs that were checked to be finite"
EXEMPT: dict[tuple[str, str], str] = {
    ("gspo_core/objective/losses.py", "dppo_delta"): _TRAINED,
    ("gspo_core/objective/weights.py", "k3_gate"): _TRAINED,
    ("gspo_core/objective/weights.py", "outlier_gate"): _TRAINED,
    ("gspo_core/objective/weights.py", "prefix_threshold"): _TRAINED,
    ("services/trainer/groups/selection.py", "stale_wait_s"): "a clock",
    ("services/trainer/telling/watchdog.py", "alarm_s"): "a clock",
    ("services/trainer/telling/watchdog.py", "end_s"): "a clock",
    ("services/trainer/attempt_process.py", "SILENCE_S"): "a clock",
}


def float_settings(model: type[BaseModel], seen: set[type] | None = None) -> Iterator[str]:
    """The names of all numbers that a job may set and that need not be whole."""
    seen = set() if seen is None else seen
    for name, field in model.model_fields.items():
        for kind in kinds_of(field.annotation):
            if kind is float:
                yield name
            elif isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
                seen.add(kind)
                yield from float_settings(kind, seen)


def kinds_of(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from kinds_of(inner)


def float_constants(tree: ast.Module) -> set[str]:
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id.isupper() and is_float(node.value)
    }


def is_float(value: ast.expr | None) -> bool:
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Div) or is_float(value.left) or is_float(value.right)
    return isinstance(value, ast.Constant) and isinstance(value.value, float)


def plain_comparisons(path: Path, settings: set[str]) -> Iterator[tuple[str, str, int]]:
    """File, name and line of each bound that is compared by an operator."""
    tree = ast.parse(path.read_bytes())
    bounds = settings | float_constants(tree) | {"bound"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or not any(isinstance(op, ORDERING) for op in node.ops):
            continue
        names = [name_of(one) for one in (node.left, *node.comparators)]
        if any(name.endswith(TENSOR) for name in names):
            continue
        constants = [isinstance(one, ast.Constant) for one in (node.left, *node.comparators)]
        for name in names:
            if name in bounds and not any(constants):
                yield str(path.relative_to(ROOT)), name, node.lineno


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return name_of(node.func) if isinstance(node.func, ast.Attribute) and node.func.attr == "abs" else ""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def measured_modules() -> list[Path]:
    """Where losses, metrics and times of a run are judged."""
    folders = ("gspo_core/objective", "gspo_core/learner", "services/trainer")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_bound_is_compared_by_an_operator() -> None:
    settings = set(float_settings(JobSpec))
    assert {"max_engine_k3", "at_least", "k3_gate", "wall_time_s", "max_grad_norm"} <= settings
    found = [one for path in measured_modules() for one in plain_comparisons(path, settings)]
    unexplained = [f"{file}:{line} {name}" for file, name, line in found if (file, name) not in EXEMPT]
    assert unexplained == [], "use gspo_core.bounds, or say in EXEMPT why there can be no NaN"
    assert set(EXEMPT) <= {(file, name) for file, name, _ in found}, "exempt, and not there any more"


def test_the_check_sees_a_plain_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "one.py"
    path.write_text("MOST = 0.2\nMANY = 3\ndef f(x, n, spec):\n    return x > MOST or spec.k3_gate >= x or n > MANY\n")
    assert [name for _, name, _ in plain_comparisons(path, {"k3_gate"})] == ["MOST", "k3_gate"]


def test_what_is_no_number_is_never_within_a_bound() -> None:
    for bound in (-1.0, 0.0, math.inf):
        assert exceeds(math.nan, bound)
        assert falls_below(math.nan, bound)
        with pytest.raises(NotANumber, match="the reward is not a number"):
            reaches(math.nan, bound, "the reward")
    assert (exceeds(2, 1), exceeds(1, 1), falls_below(0, 1), falls_below(1, 1)) == (True, False, True, False)
    assert (reaches(1, 1, "x"), reaches(0, 1, "x")) == (True, False)


def test_an_alarm_is_raised_by_what_is_no_number() -> None:
    (alarm,) = group_alarms({"groups/zero_variance": math.nan, "groups/total": 4.0})
    assert alarm.kind is AlarmKind.NO_SIGNAL
