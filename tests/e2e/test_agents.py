"""Agents on the whole stack of this machine: what they are answered is trained, and what is recorded is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.demo.demo import demo_spec, run_demo
from gspo_core.spec_file import load_job_spec
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

JOB_FILE = Path(__file__).parents[2] / "examples" / "agent" / "job.yaml"


def short_job(model_dir: Path, **changes: Any) -> Any:
    environments = [one.model_dump(mode="json", exclude_unset=True) for one in load_job_spec(JOB_FILE).environments]
    given = {"environments": environments, "steps": 2, "evaluation": {"tasks": 8, "every": 1000}}
    return changed(demo_spec(model_dir, 0), given | changes)


def test_what_an_agent_was_answered_is_trained_and_true(model_dir: Path, tmp_path: Path) -> None:
    result = run_demo(short_job(model_dir), tmp_path, model_dir, quiet=True)
    print(result)
    assert result.provenance.num_tokens == result.provenance.num_equal == 200
