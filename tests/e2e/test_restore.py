"""A backup, or a snapshot in a bucket, that is made while a job runs is good to go on from, elsewhere and with an empty
Redis."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.demo.demo import NO_KEYS, demo_spec
from gspo_core.client import Client
from services.files import snapshots
from services.files.backup import restore, save
from services.files.batch_log import read_batch
from services.files.bucket import Bucket
from services.launch.stack import Stack, StackConfig
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

CHANGES = {"steps": 8, "checkpoint_every": 2, "evaluation": None, "groups_per_step": 4}
KEEP = {"checkpoints": {"keep": 1, "keep_batches": 1000}}


def as_a_stream(here: Path, there: Path) -> Callable[[], None]:
    saved = io.BytesIO()
    save(here, saved)
    saved.seek(0)
    return lambda: restore(there, saved)


def in_a_bucket(here: Path, there: Path) -> Callable[[], None]:
    """Nothing but the bucket is taken along; the job is brought by its name."""
    bucket = Bucket.at(f"file://{here.parent}/bucket")
    snapshots.save(here, bucket, snapshots.Tally())
    snapshot = snapshots.newest(bucket)
    assert snapshot is not None
    return lambda: snapshots.restore(there, bucket, snapshot, snapshots.Tally(), snapshot.jobs)


@pytest.mark.parametrize("taken", [as_a_stream, in_a_bucket])
def test_a_job_goes_on_elsewhere(
    taken: Callable[[Path, Path], Callable[[], None]], model_dir: Path, tmp_path: Path
) -> None:
    spec = changed(demo_spec(model_dir, 0), CHANGES | KEEP)
    here, there = tmp_path / "here", tmp_path / "there"
    with Stack(StackConfig(here, model_dir, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        job = client.create_job(spec)["id"]
        for event in client.events(job):
            if event.type == "step" and event.data["step"] == 5:
                bring = taken(here, there)
                break
    bring()
    with Stack(StackConfig(there, model_dir, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        for _ in client.events(job):
            pass
        record = client.job(job)
        assert (record["status"], record["step"]) == ("succeeded", 8), record["status_reason"]
    batches = [read_batch(path) for path in sorted((there / "jobs" / job / "batches").glob("ep*"))]
    groups = [group.group for batch in batches for group in batch.groups]
    assert len(groups) == len(set(groups)) == 8 * 4
