"""Processes of a running job are killed; the job goes on and what it trained stays true."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from examples.demo.demo import NO_KEYS, demo_spec
from examples.demo.provenance import check_provenance
from gspo_core.client import Client
from services.files.job_dir import JobDir
from services.launch.stack import Stack, StackConfig
from services.state.client import connect
from services.state.queue import Bus
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

LEASE_S = "3"
CHANGES = {"steps": 8, "checkpoint_every": 2, "evaluation": None, "groups_per_step": 4}


def open_groups(redis_url: str, job: str) -> list[int]:
    async def ask() -> list[int]:
        async with connect(redis_url) as redis:
            return await Bus(redis).open_groups(job)

    return asyncio.run(ask())


@pytest.mark.parametrize("victim", ["trainer", "rollout-0", "engine", "api", "redis"])
def test_a_job_survives_the_death_of_a_process(victim: str, model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), CHANGES)
    environment = {**NO_KEYS, "GSPO_LEASE_S": LEASE_S}
    config = StackConfig(tmp_path, model_dir, port=0, environment=environment)
    with Stack(config) as stack, Client(stack.api_url) as client:
        job = client.create_job(spec)["id"]
        trained: list[tuple[int, int]] = []
        for event in client.events(job):
            if event.type == "step":
                trained.append((event.data["epoch"], event.data["step"]))
                if len(trained) == 3:
                    os.kill(stack.pids()[victim], signal.SIGKILL)
                    stack.restart(victim)
        record = client.job(job)
        assert record["status"] == "succeeded", record["status_reason"]
        assert stack.redis_url
        assert open_groups(stack.redis_url, job) == []
    epochs = {epoch for epoch, _ in trained}
    if victim == "trainer":
        assert record["attempt"] == len(epochs) == 2
        # what was logged is trained again and not sampled again: step 3 certainly, and what was logged while it
        # was published
        assert min(step for epoch, step in trained if epoch == max(epochs)) in (4, 5, 6)
    elif victim == "redis":  # a trainer that could not renew its lease in time may have been replaced
        assert {step for _, step in trained} == set(range(1, 9))
    else:
        assert record["attempt"] == 1
        assert [step for _, step in trained] == list(range(1, 9))
    provenance = check_provenance(JobDir(tmp_path / "jobs" / job), 100, seed=0)
    assert provenance.num_equal == provenance.num_tokens == 100
