"""A backup that is made while a job runs is good to go on from, elsewhere and with an empty Redis."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from examples.demo.demo import NO_KEYS, demo_spec
from gspo_core.client import Client
from services.files.backup import restore, save
from services.files.batch_log import read_batch
from services.launch.stack import Stack, StackConfig
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

CHANGES = {"steps": 8, "checkpoint_every": 2, "evaluation": None, "groups_per_step": 4}
KEEP = {"checkpoints": {"keep": 1, "keep_batches": 1000}}


def test_a_job_goes_on_from_a_backup(model_dir: Path, tmp_path: Path) -> None:
    spec = changed(demo_spec(model_dir, 0), CHANGES | KEEP)
    here, there, saved = tmp_path / "here", tmp_path / "there", io.BytesIO()
    with Stack(StackConfig(here, model_dir, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        job = client.create_job(spec)["id"]
        for event in client.events(job):
            if event.type == "step" and event.data["step"] == 5:
                save(here, saved)
                break
    saved.seek(0)
    restore(there, saved)
    with Stack(StackConfig(there, model_dir, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        for _ in client.events(job):
            pass
        record = client.job(job)
        assert (record["status"], record["step"]) == ("succeeded", 8), record["status_reason"]
    batches = [read_batch(path) for path in sorted((there / "jobs" / job / "batches").glob("ep*"))]
    groups = [group.group for batch in batches for group in batch.groups]
    assert len(groups) == len(set(groups)) == 8 * 4
