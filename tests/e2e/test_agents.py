"""Agents on the whole stack of this machine: what they are answered is trained, and what is recorded is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.agent_demo import AGENT_PYTHON, agent_service, spec_of
from examples.demo.demo import demo_spec, run_demo
from gspo_core.spec_file import load_job_spec
from services.hosts.venv import Interpreters
from services.process.ports import free_port
from tests.e2e.test_learning import changed
from tests.repo.pages import block

pytestmark = pytest.mark.slow

WORLDS = "docs/worlds.md"
ITS_REWARD = "    @vf.reward(weight=1.0)"
SHORT_ONES = """    @vf.reward(weight=0.01)
    async def short(self, trace: vf.Trace) -> float:
        return -float(len(trace.last_reply))

"""
JOB_FILE = Path(__file__).parents[2] / "examples" / "agent" / "job.yaml"


def short_job(model_dir: Path, **changes: Any) -> Any:
    environments = [one.model_dump(mode="json", exclude_unset=True) for one in load_job_spec(JOB_FILE).environments]
    given = {"environments": environments, "steps": 2, "evaluation": {"tasks": 8, "every": 1000}}
    return changed(demo_spec(model_dir, 0), given | changes)


def test_what_an_agent_was_answered_is_trained_and_true(model_dir: Path, tmp_path: Path) -> None:
    result = run_demo(short_job(model_dir), tmp_path, model_dir, quiet=True)
    print(result)
    assert result.provenance.num_tokens == result.provenance.num_equal == 200


@pytest.mark.skipif(not AGENT_PYTHON.exists(), reason="the packages are not installed: make test-agents")
def test_an_agent_of_its_own_process_learns_the_demos_task(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks with the unmodified package, and was given a URL and a key and nothing else of ours."""
    monkeypatch.setenv("GSPO_OUTBOUND_NETWORKS", "127.0.0.0/8")
    port = free_port()
    with agent_service(port):
        result = run_demo(spec_of("agent", model_dir, 0, port), tmp_path, model_dir, quiet=True)
    print(result)
    # As for the demo's environment (test_learning.py); measured in benchmarks/results/agent_demo.md.
    assert result.before <= 0.45
    assert result.after >= 0.85
    assert [step for step, _ in result.evaluations] == [0, 20, 40, 60]
    assert result.provenance.num_tokens == result.provenance.num_equal == 200


@pytest.mark.third_party
@pytest.mark.timeout(1800)
def test_what_verifiers_was_answered_is_trained_and_true(model_dir: Path, tmp_path: Path) -> None:
    """The taskset of docs/worlds.md, with a reward that differs between episodes: the model does not know this task."""
    ref = f"{tmp_path}/shop_agent.py:Verifiers"
    taskset = block(WORLDS, '"""shop_v1.py"""').text.replace(ITS_REWARD, SHORT_ONES + ITS_REWARD)
    (tmp_path / "shop_v1.py").write_text(taskset)
    (tmp_path / "shop_agent.py").write_text(block(WORLDS, "# shop_agent.py").text)
    venvs = Path(__file__).parents[2] / ".make" / "venvs"
    Interpreters(venvs, may_install=True).find(ref)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "venvs").symlink_to(venvs)
    env = {"taskset": {"id": "shop-v1"}, "agent": {"harness": {"id": "null"}, "max_turns": 2}}
    job = changed(
        demo_spec(model_dir, 0),
        {
            "environments": [{"ref": ref, "agent": {}, "config": {"env": env, "num_eval_tasks": 1}}],
            "steps": 2,
            "groups_per_step": 2,
            "rollout": {"group_size": 4, "max_staleness": 1},
            "evaluation": {"tasks": 1, "every": 1000},
            "limits": {"max_context_tokens": 2048, "reset_timeout_s": 300, "episode_timeout_s": 900},
        },
    )
    result = run_demo(job, tmp_path / "data", model_dir, quiet=True)
    print(result)
    assert result.provenance.num_tokens == result.provenance.num_equal == 200
