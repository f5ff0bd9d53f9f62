"""A trainer that is asked to leave hands its job over at a step boundary, saved: nothing is trained twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.process.cancelling import cancel_all
from services.state.process_requests import Drains
from services.trainer.past import recovery
from services.trainer.run import JobRun
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import (
    Hook,
    Loop,
    a_loop,
    after_each_step,
    fingerprint,
    loop_spec,
    plain_loop,
    saved,
)

DEADLINE_S = HANG_S
STEPS = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def loop(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Loop]:
    monkeypatch.setattr("services.state.process_requests.DRAIN_LOOK_S", 0.01)
    spec = loop_spec(model_dir, steps=STEPS, checkpoint_every=100)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        yield loop


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    return after_each_step(monkeypatch)


async def serve(loop: Loop, name: str) -> None:
    """What the trainer's process does: until it is drained, or the job is over."""
    leaving, over = asyncio.Event(), asyncio.Event()
    worker = loop.worker(name)
    asking = asyncio.create_task(Drains(loop.redis).wait(name, leaving))
    serving = asyncio.create_task(worker.run(over, leaving))
    async with asyncio.timeout(DEADLINE_S):
        while not serving.done():
            if (await loop.store.jobs.get(loop.job)).status.is_terminal:
                over.set()
            await asyncio.sleep(0.02)
    await cancel_all([asking], again_after_s=0.1)
    await serving


def checkpoints(loop: Loop) -> list[int]:
    return [one.position.step for one in CheckpointStore(JobDir(loop.job_dir)).newest_first()]


async def test_the_step_is_ended_and_saved_and_another_trainer_goes_on(
    loop: Loop, hook: list[Hook], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Any] = []
    recover = recovery.recover

    def watched(*args: Any, **options: Any) -> Any:
        found = recover(*args, **options)
        replayed.append((found.saved.step, found.reached.step))
        return found

    monkeypatch.setattr("services.trainer.run.recover", watched)

    async def drain(run: JobRun, step: int) -> None:
        if step == 2 and not run.phase.is_leaving and len(replayed) == 1:
            await Drains(loop.redis).ask("first")
            while not run.phase.is_leaving:
                await asyncio.sleep(0.01)

    hook.append(drain)
    await serve(loop, "first")
    job = await loop.store.jobs.get(loop.job)
    assert (job.step, checkpoints(loop)) == (2, [2])
    assert [(one.trainer, one.code) for one in job.attempts] == [("first", "handed_over")]
    await serve(loop, "second")
    job = await loop.store.jobs.get(loop.job)
    assert (str(job.status), job.step) == ("succeeded", STEPS)
    assert [one.trainer for one in job.attempts] == ["first", "second"]
    assert replayed[1] == (2, 2)  # nothing of it is trained again
    assert max(loop.played.values()) == loop.spec.rollout.group_size  # and nothing sampled again
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(loop.spec, tmp_path))


async def test_a_paused_job_is_handed_over_paused(loop: Loop, hook: list[Hook]) -> None:
    async def pause(_: JobRun, step: int) -> None:
        if step == 1:
            await loop.store.jobs.set_desired_state(loop.job, "paused")

    async def ask_once_paused() -> None:
        while (await loop.store.jobs.get(loop.job)).status != "paused":
            await asyncio.sleep(0.02)
        await Drains(loop.redis).ask("first")

    hook.append(pause)
    asking = asyncio.create_task(ask_once_paused())
    await serve(loop, "first")
    await asking
    job = await loop.store.jobs.get(loop.job)
    assert (str(job.status), job.step, checkpoints(loop)) == ("paused", 1, [1])
    await loop.store.jobs.set_desired_state(loop.job, "running")
    await serve(loop, "second")
    assert str((await loop.store.jobs.get(loop.job)).status) == "succeeded"


async def test_a_trainer_without_a_job_just_ends(loop: Loop) -> None:
    await loop.store.jobs.set_desired_state(loop.job, "cancelled")
    await Drains(loop.redis).ask("idle")
    leaving = asyncio.Event()
    worker = loop.worker("idle", make=lambda: pytest.fail("no job"))
    asking = asyncio.create_task(Drains(loop.redis).wait("idle", leaving))
    async with asyncio.timeout(DEADLINE_S):
        await worker.run(asyncio.Event(), leaving)
    await asking
    assert await loop.store.fleet.trainers() == []
