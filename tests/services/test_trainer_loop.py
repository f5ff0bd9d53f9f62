"""The loop as a whole is the loop that was meant: bit for bit what a plain one computes from the same seeds."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.batch_log import BatchLog
from services.bus import Fenced
from services.trainer.checkpoints import CheckpointStore
from services.trainer.worker import TrainerWorker
from tests.core.learner_support import write_model
from tests.services.loop_kit import LEASE_S, Fate, Killed, Life, Loop, a_loop, fingerprint, loop_spec, plain_loop, saved

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def serve(loop: Loop) -> None:
    """A trainer's process, until the job is over."""
    end = asyncio.Event()
    worker = TrainerWorker(loop.store, "trainer", lambda claim, _spec: loop.run_of(claim), lease_s=LEASE_S)
    serving = asyncio.create_task(worker.run(end))
    async with asyncio.timeout(DEADLINE_S):
        while not (await loop.store.get_job(loop.job)).status.is_terminal and not serving.done():
            await asyncio.sleep(0.05)
        end.set()
        await serving
    job = await loop.store.get_job(loop.job)
    assert job.status == "succeeded", job.status_reason


async def test_without_staleness_the_service_is_a_plain_on_policy_loop(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
    trained = saved(loop)
    assert trained.counters.num_updates == spec.steps * spec.objective.minibatches
    assert fingerprint(trained) == fingerprint(plain_loop(spec, tmp_path))
    other = spec.model_copy(update={"seed": spec.seed + 1})
    assert fingerprint(trained) != fingerprint(plain_loop(other, tmp_path / "other")), "the comparison sees a seed"
    assert BatchLog(loop.job_dir).steps() == [(1, step) for step in range(1, spec.steps + 1)]


async def serve_although_killed(loop: Loop, fate: Fate, wiped_after: set[int]) -> int:
    """One trainer after the other, each until it dies; after some deaths Redis is empty too. Returns how many."""
    for number in range(200):
        claim = await loop.claim()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await loop.run_of(claim, guard=partial(fate.guard, Life())).run()
        except (Killed, Fenced):
            if number in wiped_after:
                await loop.redis.flushall()
            continue
        return number + 1
    raise AssertionError(f"200 trainers did not finish: {fate.points}")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
async def test_a_loop_that_is_killed_at_random_points_ends_bit_for_bit_where_an_undisturbed_one_does(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Redis is wiped twice on the way; no checkpoint is due between most deaths, so the batch logs carry the run."""
    spec, fate = loop_spec(model_dir, checkpoint_every=4), Fate(seed, 0.03)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        num_trainers = await serve_although_killed(loop, fate, {1, 3})
    assert num_trainers > 3, fate.points
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path))
    newest = CheckpointStore(loop.job_dir).newest_first()[0]
    assert list(newest.lineage.owed()) == []
    assert newest.position.step == newest.lineage.step == spec.steps
