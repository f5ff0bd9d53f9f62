"""A user is erased after training: what they said is in no file of the job, and nobody pretends that it still is."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.demo import follow_job, started
from gspo_core.cli import main
from gspo_core.client import Client
from tests.e2e.test_agents import short_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGENT = """
from types import SimpleNamespace

from examples.agent import agent

tasks, eval_tasks, limits, replayable = agent.tasks, agent.eval_tasks, agent.limits, agent.replayable
post = agent.client.post


def named(url, headers, json):
    expression = json["messages"][1]["content"]
    return post(url, headers=headers, json={**json, "user": "ann-of-the-test" if "+" in expression else "bob"})


agent.client = SimpleNamespace(post=named)
run = agent.run
"""
ANN = "ann-of-the-test"


def test_a_user_is_erased_from_what_was_trained(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "named.py").write_text(AGENT)
    spec = short_job(model_dir, environments=[{"ref": f"{tmp_path}/named.py:run", "agent": {}}])
    with started(tmp_path / "data", model_dir, quiet=True) as stack:
        job = follow_job(stack, spec, quiet=True).view.job_id
        with Client(stack.api_url) as client:
            before = {one["id"]: one for one in client.episodes(job)}
            of_ann = {one["id"]: one for one in client.episodes(job, user=ANN)}
            rows = client.metrics(job)
            assert 0 < len(of_ann) < len(before) == 2 * 8 * 8
            assert main(["erase", job, "--user", ANN, "--url", stack.api_url]) == 0
            said = capsys.readouterr().out
            assert f"{len(of_ann)} trained episodes are erased" in said
            assert all(f"{one} entered step " in said for one in of_ann)
            after = {one["id"]: one for one in client.episodes(job)}
            assert {name for name, one in after.items() if one["is_erased"]} == of_ann.keys()
            same = ("reward", "advantage", "num_tokens", "versions", "stop_reason")
            assert all(after[name][key] == one[key] for name, one in before.items() for key in same)
            assert client.metrics(job) == rows
    folder = tmp_path / "data" / "jobs" / job
    holding = [path for path in folder.rglob("*") if path.is_file() and ANN.encode() in path.read_bytes()]
    assert holding == []
    assert main(["replay", f"{folder}@1"]) != 0
    assert "erased since" in capsys.readouterr().err
