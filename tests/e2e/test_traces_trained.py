"""What a key that just talks was told becomes a job: from an unmodified `openai` client to the last weights."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.agent_demo import AGENT_PYTHON
from examples.demo.demo import demo_spec
from gspo_core.cli import main
from gspo_core.client import Client
from gspo_core.replay.past import Past
from tests.e2e.test_learning import changed
from tests.e2e.test_up import running, wait_for_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not AGENT_PYTHON.exists(), reason="the packages are not installed: make test-agents"),
]

CONVERSATIONS = 4
TALKER = """
import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
for number in range(int(sys.argv[3])):
    said = [{"role": "system", "content": f"calculator {number}"}, {"role": "user", "content": "2 + 3"}]
    answer = client.chat.completions.with_raw_response.create(model="policy", messages=said)
    print(answer.headers["x-gspo-trace"])
"""


def test_traces_of_a_running_job_are_trained_to_the_end(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = changed(demo_spec(model_dir, 0), {"steps": 10_000, "evaluation": None, "groups_per_step": 2})
    with running(tmp_path / "data", model_dir) as up, Client(up.url) as client:
        job = client.create_job(spec)["id"]
        wait_for_step(client, job, 1)
        key = client.make_talk_key(job)["key"]
        gateway = re.search(r"gateway (http\S+)", up.printed)
        assert gateway is not None
        talk = [str(AGENT_PYTHON), "-c", TALKER, f"{gateway[1]}/v1", key, str(CONVERSATIONS)]
        traces = subprocess.run(talk, check=True, timeout=600, stdout=subprocess.PIPE, text=True).stdout.split()
        assert len(traces) == CONVERSATIONS
        assert sorted(traces) == sorted(one["id"] for one in client.traces(job))
        client.cancel(job)
        up.until(lambda: client.job(job)["status"] == "cancelled")
        file = tmp_path / "groups.json"
        file.write_text(json.dumps([{traces[0]: 1.0, traces[1]: 0.0}, {traces[2]: 0.5, traces[3]: 0.25}]))
        asked = ["retrain", job, "--traces", str(file), "--set", "groups_per_step=1", "--url", up.url]
        assert main([*asked, "--dry-run"]) == 0
        assert "2 groups of traces, in 2 steps" in capsys.readouterr().err
        assert main(asked) == 0
        made = capsys.readouterr().out.strip()
        up.until(lambda: client.job(made)["status"] in ("succeeded", "failed"))
        assert client.job(made)["status"] == "succeeded", client.job(made)
    folder = tmp_path / "data" / "jobs" / made
    rewards = [one.reward for step in (1, 2) for one in Past(folder).batch(step).trajectories]
    assert rewards == [1.0, 0.0, 0.5, 0.25]
    assert main(["audit", str(folder), "--replay"]) == 0
    assert "every version bit for bit" in capsys.readouterr().out
