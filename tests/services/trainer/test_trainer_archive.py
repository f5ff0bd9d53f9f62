"""A job with an archive can be trained again from its first step on, whatever else was removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.replay.audit import audit
from gspo_core.replay.past import NotKept, Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir, positions_in
from services.files.origin import plan
from services.trainer.run import JobRun
from tests.core.learner_support import write_model
from tests.services.trainer.loop_kit import a_loop, fingerprint, loop_spec, saved, serve
from tests.services.trainer.test_trainer_forks import child_spec, fork_of

STEPS = 7
KEPT = {"keep": 1, "keep_batches": 1, "keep_versions": 1000}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def test_every_step_is_trained_again_from_the_base_model(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=STEPS, checkpoints=KEPT | {"archive": "all"})
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        child = await fork_of(loop, child_spec(loop, 2))
    job, past = JobDir(loop.job_dir), Past(loop.job_dir)
    assert [at.step for at in positions_in(job.archive)] == list(range(1, STEPS))
    assert [at.step for at in BatchLog(job).written()] == [STEPS]
    assert [at.step for at in past.checkpoints] == [STEPS]
    answer = replay(past, ReplayQuestion(1, STEPS))
    assert answer.is_same
    assert answer.start == "the base model"
    assert sum(len(one.versions) for one in answer.steps) == STEPS
    assert [link.step for link in audit(past, loop.job).chain.links] == list(range(1, STEPS + 1))
    assert sorted(Past(child.job_dir / "origin").batches) == [1, 2]
    shutil.rmtree(job.archive)
    with pytest.raises(NotKept):
        replay(Past(loop.job_dir), ReplayQuestion(3, 3))


async def test_without_an_archive_old_logs_go(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=STEPS, checkpoints=KEPT)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
    job = JobDir(loop.job_dir)
    assert [at.step for at in BatchLog(job).steps()] == [STEPS]
    assert not job.archive.exists()


async def test_with_checkpoints_kept_for_good_no_step_is_far_away(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the two numbers do not divide each other, and in a fork."""
    kept = KEPT | {"archive": "all", "keep_every": 3}
    spec = loop_spec(model_dir, steps=8, checkpoints=kept)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        job, past = JobDir(loop.job_dir), Past(loop.job_dir)
        child = await fork_of(loop, child_spec(loop, 2, same_batches=True))
        await serve(child)
    assert [at.step for at in past.checkpoints] == [3, 6, 8]
    assert [plan(job, step).num_replayed for step in range(9)] == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    answer = replay(past, ReplayQuestion(5, 5))
    assert answer.is_same
    assert answer.num_replayed == 1
    assert fingerprint(saved(child)) == fingerprint(saved(loop))
    assert Past(child.job_dir).checkpoints == [(0, 2), (1, 3), (1, 6), (1, 8)]
    assert [plan(JobDir(child.job_dir), step).num_replayed for step in range(2, 9)] == [0, 0, 1, 2, 0, 1, 0]


async def test_without_an_archive_a_job_can_be_forked_where_checkpoints_are_kept(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=STEPS, checkpoints=KEPT | {"keep_every": 3})
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
    found = plan(JobDir(loop.job_dir), 3)
    assert (found.start, found.num_replayed, found.ahead) == ((1, 3), 0, ())
    with pytest.raises(NotKept, match=r"there is a way to 0, 3, 6-7"):
        plan(JobDir(loop.job_dir), 4)


async def test_from_when_on_checkpoints_are_kept_for_good_may_change(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=STEPS, checkpoint_every=1, checkpoints=KEPT | {"keep_every": 2})
    after_step, seen = JobRun._after_step, dict[int, list[int]]()
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:

        async def hooked(run: JobRun, *given: Any) -> None:
            await after_step(run, *given)
            step = run._lineage.step
            if step == 4:
                await run._saving.finish()
                seen[step] = [at.step for at in Past(loop.job_dir).checkpoints]
                change = {"checkpoints.keep_every": 3}
                await loop.store.jobs.change_settings(loop.job, 0, change, change)

        monkeypatch.setattr(JobRun, "_after_step", hooked)
        await serve(loop)
    assert seen[4] == [2, 4]
    assert [at.step for at in Past(loop.job_dir).checkpoints] == [6, STEPS]
