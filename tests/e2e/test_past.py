"""A job's past as its user asks for it, over HTTP and by commands, of a job that a real trainer and engine have made.

One job is played. What was trained on it again, forked from it and resumed is trained by the same installation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.demo.demo import NO_KEYS, demo_spec
from gspo_core.client import Client
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.launch.stack import Stack, StackConfig
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

DEADLINE_S = 600.0
STEPS = 4
CHANGES = {
    "steps": STEPS,
    "evaluation": None,
    "groups_per_step": 4,
    "checkpoint_every": 2,
    "checkpoints": {"keep": 2, "keep_batches": 2, "archive": "all"},
}


@dataclass
class Installation:
    stack: Stack
    client: Client
    data_dir: Path
    job: str
    """That was played."""

    def gspo(self, *words: str) -> str:
        """What the command says; it must end well."""
        command = str(Path(sys.executable).with_name("gspo"))
        done = subprocess.run(
            [command, *words], cwd=self.data_dir.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def over_http(self, *words: str) -> str:
        return self.gspo(*words, "--url", self.stack.api_url)

    def on_disk(self, *words: str) -> str:
        return self.gspo(*words, "--data-dir", str(self.data_dir))

    def trained(self, job: str) -> list[str]:
        """The digests of its last weights, once it has succeeded."""
        deadline = time.monotonic() + DEADLINE_S
        while (record := self.client.job(job))["status"] != "succeeded":
            self.stack.check()
            assert record["status"] not in ("failed", "cancelled"), record
            assert time.monotonic() < deadline, record
            time.sleep(0.1)
        store = WeightStore(JobDir(self.data_dir / "jobs" / job))
        return [file.sha256 for file in store.manifest(store.versions()[-1]).files]


@pytest.fixture(scope="module")
def here(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    data_dir = tmp_path_factory.mktemp("past") / "data"
    with Stack(StackConfig(data_dir, model_dir, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        job = client.create_job(changed(demo_spec(model_dir, 0), CHANGES))["id"]
        made = Installation(stack, client, data_dir, job)
        made.trained(job)
        yield made


def test_retraining_ends_at_the_weights_of_the_job_that_was_played(here: Installation) -> None:
    """From its first step on and with its settings; nothing is sampled for it."""
    again = here.over_http("retrain", here.job, "--name", "again").strip()
    assert here.trained(again) == here.trained(here.job)
    assert [one["id"] for one in here.client.jobs(parent=here.job)] == [again]
    assert "every version bit for bit" in here.on_disk("audit", again, "--replay")


def test_other_rewards_lead_elsewhere(here: Installation, tmp_path: Path) -> None:
    """As a rescoring has found them."""
    reward = tmp_path / "other.py"
    reward.write_text("def score(episode):\n    return 1.0 - (episode.reward or 0.0)\n")
    rewards = tmp_path / "rewards.json"
    here.on_disk("rescore", here.job, "--reward", f"{reward}:score", "--to", str(rewards))
    assert json.loads(rewards.read_text())
    other = here.over_http("retrain", here.job, "--rewards", str(rewards)).strip()
    assert here.trained(other) != here.trained(here.job)


def test_a_fork_that_is_fed_its_parents_batches_ends_at_its_parents_weights(here: Installation) -> None:
    fork = here.over_http("fork", f"{here.job}@1", "--same-batches").strip()
    assert here.trained(fork) == here.trained(here.job)


def test_the_signed_chain_of_a_job_is_believed_later(here: Installation, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    key, chain = tmp_path / "key", tmp_path / "job.chain"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    said = here.on_disk("audit", f"{here.job}@{STEPS}", "--to", str(chain), "--sign", str(key))
    assert said.endswith(f"written to {chain}, signed in {chain}.sig\n")
    said = here.on_disk("audit", here.job, "--chain", str(chain), "--signed-by", f"{key}.pub")
    assert said.endswith(f"as {chain} tells, signed by the holder of {key}.pub\n")


def test_its_tables_are_read_by_others(here: Installation, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    here.on_disk("tables", here.job, "--to", str(tmp_path), "--tokens", "--last", str(STEPS))
    rows = parquet.read_table(tmp_path / "episodes.parquet").to_pylist()
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1))
    tokens = parquet.read_table(tmp_path / "tokens.parquet")
    assert sum(tokens["is_sampled"].to_pylist()) == sum(row["sampled_tokens"] for row in rows)


def test_a_job_that_is_over_goes_on(here: Installation) -> None:
    """Last: the others ask about the job as it was played."""
    before = here.trained(here.job)
    here.over_http("resume", here.job, "--steps", str(STEPS + 2), "--horizon", str(STEPS + 2))
    assert here.trained(here.job) != before
    assert here.client.job(here.job)["step"] == STEPS + 2
    assert "every version bit for bit" in here.on_disk("audit", here.job, "--replay")
