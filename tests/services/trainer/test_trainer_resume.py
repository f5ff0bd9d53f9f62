"""A job that is over goes on as itself, bit for bit as the run that was never over."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.replay.journey import arrive
from gspo_core.replay.past import Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from gspo_core.spec import JobSpec
from services.api.http.errors import RequestRefused
from services.api.submission.resuming import ResumeRequest, resume
from services.api.views.history import TrainedHistory
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir, JobsDir
from services.state.jobs import CancelManner, JobStatus
from services.trainer.run import JobRun
from tests.core.learner_support import write_model
from tests.services.trainer.loop_kit import (
    Hook,
    Loop,
    a_loop,
    after_each_step,
    fingerprint,
    loop_spec,
    plain_loop,
    saved,
    serve,
)

KEPT = {"keep_versions": 1000, "keep": 100}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def go_on(loop: Loop, **wanted: Any) -> None:
    context: Any = SimpleNamespace(store=loop.store, history=TrainedHistory(JobsDir(loop.job_dir.parent)))
    await resume(context, await loop.store.jobs.get(loop.job), ResumeRequest(**wanted))
    await serve(loop)


def longer(spec: JobSpec, **changes: Any) -> JobSpec:
    return JobSpec.model_validate(spec.model_dump() | changes)


async def test_a_job_that_succeeded_takes_more_steps(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=3)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        versions = {one.version for one in await loop.store.versions.all(loop.job)}
        await go_on(loop, steps=5)
        job = await loop.store.jobs.get(loop.job)
        published = [one.version for one in await loop.store.versions.all(loop.job)]
    assert (job.status, job.step, job.settings) == (JobStatus.SUCCEEDED, 5, {"steps": 5})
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(longer(spec, steps=5), tmp_path / "plain"))
    assert len(set(published)) == len(published) > len(versions)


async def test_going_back_leaves_what_came_later_and_loses_and_doubles_no_group(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is no checkpoint: the way there is trained again."""
    spec = loop_spec(model_dir, steps=5)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        await go_on(loop, from_step=3)
        job = await loop.store.jobs.get(loop.job)
        assert (job.status, job.step) == (JobStatus.SUCCEEDED, 5)
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path / "plain"))
    newest = CheckpointStore(JobDir(loop.job_dir)).newest_first()[0]
    assert list(newest.lineage.owed()) == []
    assert newest.lineage.num_dispatched == spec.steps * spec.groups_per_step
    log = BatchLog(JobDir(loop.job_dir))
    assert [at for at in log.steps() if at.step > 3] == [(1, 4), (1, 5), (3, 4), (3, 5)]
    for step in (4, 5):
        numbers = [{group.group for group in log.read(epoch, step).groups} for epoch in (1, 3)]
        assert numbers[0] == numbers[1]


async def test_where_it_goes_back_to_is_written_down_by_its_trainer_if_nobody_else_did(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the process of the API was killed when the job had just gone back."""
    spec = loop_spec(model_dir, steps=3)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        monkeypatch.setattr("services.api.submission.resuming._write_down", lambda *_: None)
        await go_on(loop, from_step=2)
    assert [at for at in BatchLog(JobDir(loop.job_dir)).steps() if at.step > 2] == [(1, 3), (3, 3)]
    assert CheckpointStore(JobDir(loop.job_dir)).forks() == {1: (0, 0), 2: (1, 2), 3: (1, 2)}
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path / "plain"))


async def test_a_job_that_was_cancelled_goes_on_where_it_was(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, hooks = loop_spec(model_dir, steps=5, checkpoint_every=100), after_each_step(monkeypatch)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:

        async def cancel(_: JobRun, step: int) -> None:
            if step == 3:
                await loop.store.jobs.set_desired_state(loop.job, "cancelled", CancelManner.NOW)
                while True:
                    await asyncio.sleep(0.01)

        hooks.append(cancel)
        await serve(loop, ends="cancelled")
        hooks.clear()
        await go_on(loop)
        assert (await loop.store.jobs.get(loop.job)).status is JobStatus.SUCCEEDED
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path / "plain"))


async def test_a_job_that_failed_goes_on_where_it_was(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, hooks = loop_spec(model_dir, steps=5), after_each_step(monkeypatch)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:

        async def fail(_: JobRun, step: int) -> None:
            if step == 3:
                raise RuntimeError("a bug of ours")

        hooks.append(fail)
        await serve(loop, ends="failed")
        hooks.clear()
        await go_on(loop)
        assert (await loop.store.jobs.get(loop.job)).status is JobStatus.SUCCEEDED
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path / "plain"))


async def ended(loop: Loop, hooks: list[Hook], ending: str, step: int) -> None:
    """Let the job end so after ``step`` steps, or at its own end."""

    async def meddle(_: JobRun, done: int) -> None:
        if done == step and ending == "failed":
            raise RuntimeError("a bug of ours")
        if done == step and ending == "cancelled":
            await loop.store.jobs.set_desired_state(loop.job, "cancelled", CancelManner.NOW)
            while True:
                await asyncio.sleep(0.01)

    hooks.append(meddle)
    await serve(loop, ends=ending)
    hooks.clear()


def check_against_its_own_logs(loop: Loop, steps: int) -> None:
    """Bit for bit what the logs lead to, every version of every step; each group is in one step or dropped, never in
    two and never lost."""
    past = Past(loop.job_dir)
    answer = replay(past, ReplayQuestion(1, steps))
    assert answer.is_same
    assert all(one.versions for one in answer.steps)
    assert past.newest_epoch > 1
    batches = [past.batch(step) for step in range(1, steps + 1)]
    trained = [group.group for batch in batches for group in batch.groups]
    dropped = [group for batch in batches for some in batch.extra["dropped"].values() for group in some]
    assert len(trained) == len(set(trained)) == steps * loop.spec.groups_per_step
    assert not set(trained) & set(dropped)
    # The job ended when it had enough: what was begun beyond that is owed, and owed only.
    newest = CheckpointStore(JobDir(loop.job_dir)).newest_first()[0]
    owed = set(newest.lineage.owed())
    assert set(trained) | set(dropped) | owed == set(range(newest.lineage.num_dispatched))
    assert not owed & {*trained, *dropped}
    assert fingerprint(saved(loop)) == fingerprint(arrive(past, newest.position.step).learner)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled"])
async def test_with_old_tokens_it_is_what_its_own_logs_lead_to(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    await resumed_with_old_tokens(redis_client, tmp_path, model_dir, monkeypatch, ending, random.Random(ending))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ending", ["succeeded", "failed", "cancelled"])
async def test_with_old_tokens_and_drawn_seeds_it_is_what_its_own_logs_lead_to(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    for number in range(4):
        seed = random.SystemRandom().randrange(10**6)
        print(f"{ending}: seed {seed}")
        place = tmp_path / str(number)
        await resumed_with_old_tokens(redis_client, place, model_dir, monkeypatch, ending, random.Random(seed))
        await redis_client.flushall()


async def resumed_with_old_tokens(
    redis: Redis, root: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, ending: str, chance: random.Random
) -> None:
    """Which tokens are old is decided by who came first; twice over, the second time from an earlier step."""
    rollout = {"group_size": 3, "max_staleness": chance.choice([1, 2, 3])}
    steps, first = chance.randint(3, 4), 2
    spec = loop_spec(model_dir, steps=steps, rollout=rollout, seed=chance.randrange(1000), checkpoints=KEPT)
    hooks = after_each_step(monkeypatch)
    async with a_loop(redis, root / "jobs", spec, monkeypatch) as loop:
        await ended(loop, hooks, ending, first)
        steps += 1
        await go_on(loop, steps=steps)
        check_against_its_own_logs(loop, steps)
        back = chance.randint(1, steps - 1)
        await go_on(loop, from_step=back, steps=steps)
        check_against_its_own_logs(loop, steps)
        ages = [
            int(age)
            for step in range(1, steps + 1)
            for age in Past(loop.job_dir).batch(step).extra["staleness"].values()
        ]
    assert max(ages) > 0, "no token was old: this shows nothing"


async def test_a_longer_job_keeps_the_schedule_of_its_rate_unless_it_is_told_another_horizon(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = {"lr": 3e-3, "schedule": "cosine"}
    spec = loop_spec(model_dir, steps=3, optimizer={**rate, "min_lr_ratio": 0.5})
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        await go_on(loop, steps=4)
        rows = {row["step"]: row["learner/lr"] for row in await loop.store.metrics.read(loop.job)}
        assert rows[4] == pytest.approx(1.5e-3), "the decay is over"
        await go_on(loop, steps=6, horizon=100, from_step=2)
        rows = {row["step"]: row["learner/lr"] for row in await loop.store.metrics.read(loop.job)}
        assert rows[6] > 2.9e-3


async def test_what_cannot_be_is_refused_and_changes_nothing(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=2)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        before = await loop.store.jobs.get(loop.job)
        for wanted, said in [
            ({}, "steps: the job goes on from step 2 and would end at 2"),
            ({"steps": 2}, "would end at 2"),
            ({"from_step": 9, "steps": 20}, "nothing that is kept leads to step 9"),
            ({"steps": 4, "horizon": 9}, "follows no schedule"),
        ]:
            with pytest.raises(RequestRefused, match=said):
                await go_on(loop, **wanted)
        assert await loop.store.jobs.get(loop.job) == before
        assert CheckpointStore(JobDir(loop.job_dir)).forks().keys() == {1}
