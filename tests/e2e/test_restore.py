"""A backup, or a snapshot in a bucket, that is made while a job runs is good to go on from, elsewhere and with an empty
Redis."""

from __future__ import annotations

import io
import shutil
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
from services.trainer.groups.tasks import TaskSchedule
from tests.e2e.audited import BIT_FOR_BIT, audited
from tests.e2e.test_learning import changed

pytestmark = pytest.mark.slow

SEED, STEPS, GROUPS, SAVED_AT = 0, 8, 4, 5
CHANGES = {
    "steps": STEPS,
    "checkpoint_every": 2,
    "evaluation": None,
    "groups_per_step": GROUPS,
    "checkpoints": {"keep": 1, "keep_batches": 1000},
}
WORLD = """
import asyncio
from pathlib import Path

from environments.calculator import Calculator


class Gated(Calculator):
    tasks = Calculator.tasks[:{num_tasks}]

    async def reset(self, expression: str) -> str:
        while expression == self.tasks[{last}]["expression"] and not Path(__file__).with_name("gate").exists():
            await asyncio.sleep(0.05)
        return super().reset(expression)
"""
PATIENT = {"reset_timeout_s": 600}


def gated_world(folder: Path, seed: int) -> Path:
    """A world that keeps the job's last group until its folder has a file `gate`: however fast the job is, it is not
    over before, and until then it runs as it likes. Each task is that of one group."""
    num_groups = STEPS * GROUPS
    last = TaskSchedule(seed, [num_groups], [1.0]).task(num_groups - 1).index
    folder.mkdir()
    (world := folder / "gated.py").write_text(WORLD.format(num_tasks=num_groups, last=last))
    return world


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
    """And each step of it, before the move and after it, leads to its weights when it is trained again."""
    world = gated_world(tmp_path / "world", SEED)
    environments = [{"ref": f"{world}:Gated", "limits": PATIENT}]
    spec = changed(demo_spec(model_dir, SEED), CHANGES | {"environments": environments})
    here, there = tmp_path / "here", tmp_path / "there"
    with Stack(StackConfig(here, model_dir, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        job = client.create_job(spec)["id"]
        for event in client.events(job):
            if event.type == "step" and event.data["step"] == SAVED_AT:
                bring = taken(here, there)
                assert client.job(job)["status"] == "running"
                break
        world.with_name("gate").touch()
    bring()
    shutil.rmtree(here)
    with Stack(StackConfig(there, model_dir, port=0, environment=NO_KEYS)) as stack, Client(stack.api_url) as client:
        for _ in client.events(job):
            pass
        record = client.job(job)
        assert (record["status"], record["step"]) == ("succeeded", STEPS), record["status_reason"]
    batches = [read_batch(path) for path in sorted((there / "jobs" / job / "batches").glob("ep*"))]
    groups = [group.group for batch in batches for group in batch.groups]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
    said = audited(there, job)
    assert BIT_FOR_BIT in said
    assert f"{STEPS} steps" in said
