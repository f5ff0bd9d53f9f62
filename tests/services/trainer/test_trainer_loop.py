"""The loop as a whole is the loop that was meant: bit for bit what a plain one computes from the same seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from tests.core.learner_support import write_model
from tests.services.trainer.loop_kit import (
    Fate,
    a_loop,
    fingerprint,
    loop_spec,
    plain_loop,
    saved,
    serve,
    serve_although_killed,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


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
    assert BatchLog(JobDir(loop.job_dir)).steps() == [(1, step) for step in range(1, spec.steps + 1)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
async def test_a_loop_that_is_killed_at_random_points_ends_bit_for_bit_where_an_undisturbed_one_does(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Redis is wiped twice on the way; no checkpoint is due between most deaths, so the batch logs carry the run."""
    spec, fate = loop_spec(model_dir, checkpoint_every=4), Fate(seed, 0.03)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        half_written = loop.job_dir / "trained" / ".tmp-ep000001-left"
        half_written.parent.mkdir(parents=True)
        half_written.touch()
        num_trainers = await serve_although_killed(loop, fate, {1, 3})
    assert num_trainers > 3, fate.points
    assert not half_written.exists()
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(spec, tmp_path))
    newest = CheckpointStore(JobDir(loop.job_dir)).newest_first()[0]
    assert list(newest.lineage.owed()) == []
    assert newest.position.step == newest.lineage.step == spec.steps
