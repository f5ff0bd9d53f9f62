"""All of Redis is lost in the middle of a run: the same jobs are listed, and nothing is trained twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import redis

from examples.demo.demo import NO_KEYS, demo_spec
from examples.demo.provenance import check_provenance
from gspo_core.client import Client
from gspo_core.log.history import batches_after
from gspo_core.position import Position
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.launch.stack import Stack, StackConfig
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

CHANGES = {"steps": 8, "checkpoint_every": 2, "evaluation": None, "groups_per_step": 4}


def told(client: Client) -> list[tuple[str, str, object]]:
    """Of every job what does not change while it runs."""
    return [(job["id"], job["created_at"], client.config(job["id"])) for job in client.jobs(order="asc")]


def test_redis_is_wiped_in_the_middle_of_a_run(model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), CHANGES)
    config = StackConfig(tmp_path, model_dir, port=0, environment={**NO_KEYS, "GSPO_LEASE_S": "3"})
    with Stack(config) as stack, Client(stack.api_url) as client:
        job = client.create_job(spec)["id"]
        waiting = client.create_job(changed(spec, {"steps": 1}))["id"]
        steps = 0
        for event in client.events(job):
            steps += event.type == "step"
            if steps == 3:
                break
        before = told(client)
        with redis.Redis.from_url(stack.redis_url) as wiped:
            wiped.flushall()
        assert told(client) == before
        assert [one[0] for one in before] == [job, waiting]
        for _ in client.events(job):  # until the job is over
            pass
        record = client.job(job)
        assert record["status"] == "succeeded", record["status_reason"]
        assert record["attempt"] == 2
        for _ in client.events(waiting):
            pass
        assert client.job(waiting)["status"] == "succeeded"
    log, checkpoints = BatchLog(JobDir(tmp_path / "jobs" / job)), CheckpointStore(JobDir(tmp_path / "jobs" / job))
    forks = checkpoints.forks()
    lineage = batches_after(Position(0, 0), log.steps(), max(forks), forks)
    assert [one.step for one in lineage] == list(range(1, 9))
    trained = Counter(group.group for one in lineage for group in log.read(one.epoch, one.step).groups)
    assert set(trained.values()) == {1}
    provenance = check_provenance(JobDir(tmp_path / "jobs" / job), 100, seed=0)
    assert provenance.num_equal == provenance.num_tokens == 100
