"""Crashing is no way out: where a wrong answer can be turned into a crash, training makes crashes rarer."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from examples.demo.demo import demo_spec, run_demo
from gspo_core.spec import JobSpec

pytestmark = pytest.mark.slow

DODGER = Path(__file__).with_name("dodger.py")
NUM_STEPS = 20


def test_a_policy_that_can_dodge_by_crashing_learns_not_to(model_dir: Path, tmp_path: Path) -> None:
    given = demo_spec(model_dir, 0).model_dump(mode="json", exclude_unset=True)
    evaluation = {"tasks": 64, "every": 1000}
    changes = {"environments": [{"ref": f"{DODGER}:Dodger"}], "steps": NUM_STEPS, "evaluation": evaluation}
    result = run_demo(JobSpec.model_validate(given | changes), tmp_path, model_dir, quiet=True)
    (metrics,) = (tmp_path / "jobs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "episodes/count" in row]  # the others are evaluations
    crashed = [step.get("stop/env_crash", 0.0) / step["episodes/count"] for step in steps]
    print(result, crashed)
    assert mean(crashed[:3]) > 0.5
    assert mean(crashed[-5:]) <= mean(crashed[:3]) - 0.25
    (log,) = (tmp_path / "logs").glob("rollout*.log")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (left,) = (line for line in lines if line["event"] == "left")
    # Each crash has one author, and nobody who sat beside it lost an attempt.
    assert left["host/broken_by_policy"] == left["stop/env_crash"] > 100
    assert left["host/sessions_restored"] > 100
    assert not [name for name in left if name.startswith("attempts/")]
