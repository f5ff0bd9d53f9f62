"""``gspo fsck``: it names each planted fault, nothing where all is whole, and removes only what is safe."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.log.lineage import Lineage
from gspo_core.position import Position
from services.files.checkpoints import CheckpointStore
from services.files.data_dir import DataDir
from services.files.durable import write_flushed
from services.files.job_dir import JobDir, JobsDir
from services.files.weights import WeightStore
from services.launch import fsck as command
from services.state.installation import InstallationGuard
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.recorded_job import RecordedJob, record_job, write_model

OLD_S = time.time() - 2 * 86_400


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def job(redis_client: Redis, bus: Bus, data: Path, tmp_path: Path) -> RecordedJob:
    store = Store(redis_client, jobs_dir=JobsDir(data / "jobs"))
    await store.load_functions()
    return await record_job(store, bus, data / "jobs", write_model(tmp_path / "model"), num_steps=2)


@pytest.fixture
def examine(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.delenv("GSPO_REDIS_URL", raising=False)

    def run(*options: str, status: int) -> str:
        parser = command.argparse.ArgumentParser()
        command.add_options(parser)
        found = command.run(parser.parse_args(["--data-dir", str(data), *options]))
        text = capsys.readouterr().out
        assert found == status, text
        return text

    return run


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_whole_installation_is_whole_and_without_redis_the_rest_is_said(
    job: RecordedJob, examine: Callable[..., str]
) -> None:
    text = examine(status=0)
    assert "nothing is wrong here" in text
    assert "GSPO_REDIS_URL is not set: not judged" in text


def test_where_no_torch_is_installed_the_learner_s_state_is_not_judged_and_that_is_said(
    job: RecordedJob, examine: Callable[..., str], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = JobDir(next((data / "jobs").iterdir()))
    CheckpointStore(directory).write(Position(1, 1), Lineage(step=1), lambda folder: folder.mkdir())
    monkeypatch.setattr(command, "HAS_TORCH", False)
    monkeypatch.setitem(sys.modules, "gspo_core.learner", None)
    text = examine(status=0)
    assert "no torch is installed here: not judged is what checkpoints hold of the learner" in text


@pytest.mark.parametrize("part", ["batches", "weights"])
def test_one_flipped_bit_is_named(job: RecordedJob, examine: Callable[..., str], data: Path, part: str) -> None:
    directory = JobDir(next((data / "jobs").iterdir()))
    WeightStore(directory).write(9, 1, 0, lambda folder: write_flushed(folder / "model.bin", b"weights" * 100))
    assert "written and never published" in examine(status=1)
    files = sorted(path for path in (directory.path / part).rglob("*") if path.is_file())
    flip(max(files, key=lambda path: path.stat().st_size))
    before = sorted(data.rglob("*"))
    assert "damaged" in examine("--repair", status=1)
    assert sorted(data.rglob("*")) == before


def test_a_specification_that_cannot_be_read_is_named(
    job: RecordedJob, examine: Callable[..., str], data: Path
) -> None:
    accepted = JobDir(next((data / "jobs").iterdir())).accepted
    accepted.write_bytes(accepted.read_bytes()[:-20])
    assert "its specification cannot be read" in examine(status=1)


def test_a_specification_that_was_changed_by_hand_is_named(
    job: RecordedJob, examine: Callable[..., str], data: Path
) -> None:
    accepted = JobDir(next((data / "jobs").iterdir())).accepted
    changed = accepted.read_text().replace('group_size\\":4', 'group_size\\":5')
    assert changed != accepted.read_text()
    accepted.write_text(changed)
    assert "it is not the one that was accepted" in examine(status=1)


def test_what_was_left_half_written_is_named_with_its_writer_and_removed(
    job: RecordedJob, examine: Callable[..., str], data: Path
) -> None:
    job_dir = next((data / "jobs").iterdir())
    old, young = job_dir / "weights" / ".tmp-ep000007-abc", job_dir / "weights" / ".tmp-ep000008-abc"
    for path in (old, young):
        path.mkdir(parents=True)
        (path / "half").write_text("x")
    os.utime(old, (OLD_S, OLD_S))
    text = examine(status=1)
    assert "left half-written, or half-removed, by the trainer of epoch 7" in text
    assert "the trainer of epoch 8 may be at it" in text
    assert old.exists()
    assert "(removed)" in examine("--repair", status=0)
    assert (old.exists(), young.exists()) == (False, True)


async def test_redis_is_asked_whose_it_is_and_what_it_knows(
    job: RecordedJob,
    examine: Callable[..., str],
    data: Path,
    redis_client: Redis,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await InstallationGuard(redis_client, DataDir(data)).check()
    monkeypatch.setenv("GSPO_REDIS_URL", redis_server.url)

    async def examined(status: int) -> str:
        return await asyncio.to_thread(examine, status=status)

    assert "nothing is wrong here" in await examined(0)
    await redis_client.hset("gspo:{service}:installation", "id", "somebody else's")
    assert "this Redis belongs to installation somebody else's" in await examined(1)
    await redis_client.flushall()
    assert "has not been given it back yet" in await examined(0)


def test_what_was_brought_for_a_fork_that_never_came_to_be_is_removed_a_day_later(
    job: RecordedJob, examine: Callable[..., str], data: Path
) -> None:
    """A directory of a job whose specification is lost stays: it may be worth having."""
    brought, lost = JobDir(data / "jobs" / "job_brought"), JobDir(data / "jobs" / "job_lost")
    for folder in (brought.origin.batches, lost.origin.batches, lost.batches):
        folder.mkdir(parents=True)
        (folder / "ep000001-step000001").write_bytes(b"a log")
    assert "a job may be being accepted here" in examine("--repair", status=0)
    for one in (brought, lost):
        os.utime(one.path, (OLD_S, OLD_S))
    examine("--repair", status=1)
    assert not brought.path.exists()
    assert (lost.batches / "ep000001-step000001").exists()
