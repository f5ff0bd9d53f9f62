"""A run that loses what it had learned is noticed, told in words, and slowed or taken back as its job says.

The fall is planted: between two steps the weights become those of a policy that says the right thing, and later of one
that says the wrong one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis

from gspo_core.learner import Learner
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.state.jobs import JobRecord, JobStatus
from services.trainer.building import make_learner
from services.trainer.groups.batch_selection import BatchSelection
from services.trainer.groups.tasks import FIRST_EVAL_GROUP
from services.trainer.ranks.learner import AnyLearner
from services.trainer.run import JobRun
from services.trainer.telling.best_evaluation import MEAN
from tests.core.learner_support import write_model
from tests.services.trainer import loop_kit
from tests.services.trainer.loop_kit import Loop, a_loop, after_each_step, loop_spec, serve

STEPS, GOOD_AFTER, FALLS_AFTER = 6, 1, 3
NUM_HELD_OUT = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _enough_held_out_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    description = {"num_tasks": {"train": loop_kit.NUM_TASKS, "eval": NUM_HELD_OUT}}
    monkeypatch.setattr(loop_kit, "DESCRIPTION", description)


def speak(learner: Learner, *, well: bool) -> None:
    """From now on the policy nearly always says even ids, which are what is paid for, or odd ones."""
    head = next(parameter for name, parameter in learner._policy.named_parameters() if name.endswith("lm_head.weight"))
    kept, silent = (0, 1) if well else (1, 0)
    with torch.no_grad():
        head[kept::2] = 20 * torch.randn(head[kept::2].shape, generator=torch.Generator().manual_seed(0))
        head[silent::2] = 0


async def run_with_a_fall(
    redis: Redis,
    root: Path,
    model_dir: Path,
    patch: pytest.MonkeyPatch,
    *,
    is_handed_over: bool = False,
    max_staleness: int = 0,
    **watchdog: Any,
) -> tuple[Loop, JobRecord, list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Good from step 2 on, bad from step 4 on; also the alerts and the metrics by step. ``is_handed_over``: once the
    fall was answered, to another trainer."""
    spec = loop_spec(
        model_dir,
        steps=STEPS,
        checkpoint_every=100,
        optimizer={"lr": 1e-6},
        rollout={"group_size": 3, "max_staleness": max_staleness},
        evaluation={"tasks": NUM_HELD_OUT, "every": 1},
        watchdog=watchdog,
    )
    hooks, made = after_each_step(patch), list[Learner]()

    def make() -> AnyLearner:
        made.append(make_learner(spec))
        return made[-1]

    async with a_loop(redis, root, spec, patch) as loop:

        async def plant(run: JobRun, step: int) -> None:
            if len(made) == 1 and step in (GOOD_AFTER, FALLS_AFTER):
                await evaluated(loop, step)
                speak(made[0], well=step == GOOD_AFTER)
            if len(made) == 1 and (FALLS_AFTER < step < STEPS or (max_staleness and step == STEPS)):
                await evaluated(loop, step)  # else the last step may come before it
            if is_handed_over and len(made) == 1 and step > FALLS_AFTER:
                await evaluated(loop, FALLS_AFTER + 1)
                if (await loop.store.jobs.get(loop.job)).settings:
                    run.phase.leave()

        hooks.append(plant)
        await serve(loop, make)
        alerts = [event.data for event in await loop.store.events.read(loop.job) if event.type == "alert"]
        metrics = {row["step"]: row for row in await loop.store.metrics.read(loop.job)}
        return loop, await loop.store.jobs.get(loop.job), alerts, metrics


async def evaluated(loop: Loop, step: int) -> None:
    """Waits until the weights of a step have been measured, so that none but these were."""
    async with asyncio.timeout(loop_kit.DEADLINE_S):
        while not any(row["step"] == step and MEAN in row for row in await loop.store.metrics.read(loop.job)):
            await asyncio.sleep(0.01)


async def test_a_fall_is_told_and_nothing_else_happens(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, job, alerts, metrics = await run_with_a_fall(redis_client, tmp_path / "jobs", model_dir, monkeypatch)
    assert next(alert["step"] for alert in alerts if alert["kind"] == "evaluation_fell") == FALLS_AFTER + 1
    assert not [alert for alert in alerts if alert["kind"] == "fall_answered"]
    assert (job.status, job.step, job.settings) == (JobStatus.SUCCEEDED, STEPS, {})
    assert metrics[FALLS_AFTER][MEAN] > 0.9 > 0.1 > metrics[STEPS][MEAN]
    assert [position.step for position in CheckpointStore(JobDir(loop.job_dir)).positions()] == [STEPS]


async def test_a_run_that_falls_is_slowed_once(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"on_fall": "slow", "slow_by": 0.25}
    _, job, alerts, metrics = await run_with_a_fall(redis_client, tmp_path / "jobs", model_dir, monkeypatch, **given)
    [answer] = [alert for alert in alerts if alert["kind"] == "fall_answered"]
    assert f"after step {FALLS_AFTER + 1}; it was 1 after step" in answer["message"]
    assert answer["message"].endswith("the learning rate is 2.5e-07 from now on")
    assert (job.status, job.step, job.settings) == (JobStatus.SUCCEEDED, STEPS, {"optimizer.lr": 2.5e-7})
    assert (metrics[FALLS_AFTER]["learner/lr"], metrics[STEPS]["learner/lr"]) == (1e-6, 2.5e-7)


async def test_a_fall_that_was_answered_is_not_answered_again_by_the_next_trainer(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It measures the run before it trains, and knows the evaluations of the one before."""
    given: dict[str, Any] = {"on_fall": "slow", "slow_by": 0.25, "is_handed_over": True}
    _, job, alerts, metrics = await run_with_a_fall(redis_client, tmp_path / "jobs", model_dir, monkeypatch, **given)
    [answer] = [alert for alert in alerts if alert["kind"] == "fall_answered"]
    assert answer["back_to"] is None
    assert len(job.attempts) == 2
    assert metrics[STEPS][MEAN] < 0.1, "it has not come back"
    assert (job.status, job.settings) == (JobStatus.SUCCEEDED, {"optimizer.lr": 2.5e-7})


async def test_a_run_that_falls_goes_back_to_its_best_evaluation(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"on_fall": "go_back"}
    loop, job, alerts, metrics = await run_with_a_fall(redis_client, tmp_path / "jobs", model_dir, monkeypatch, **given)
    [answer] = [alert for alert in alerts if alert["kind"] == "fall_answered"]
    back = GOOD_AFTER + 1
    assert answer["message"].endswith(f"the learning rate is 5e-07 from now on, and the job goes on from step {back}")
    assert (job.status, job.step, job.settings) == (JobStatus.SUCCEEDED, STEPS, {"optimizer.lr": 5e-7})
    directory = JobDir(loop.job_dir)
    assert CheckpointStore(directory).forks()[2] == (1, back)
    assert [at.step for at in BatchLog(directory).steps() if at.epoch == 3] == list(range(back + 1, STEPS + 1))
    newest = CheckpointStore(directory).newest_first()[0]
    assert newest.position == (3, STEPS)
    assert list(newest.lineage.owed()) == []
    assert metrics[STEPS][MEAN] > 0.9, "the last weights are not those that were spoiled"


async def test_nothing_that_a_fallen_policy_sampled_is_trained_after_the_run_went_back(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups for two more steps are under way when it falls: they are played anew."""
    original, found = BatchSelection.commit_again, list[tuple[int, list[int]]]()

    async def noting(self: BatchSelection) -> None:
        found.append((self._lineage.num_dispatched, await self._bus.open_groups(self._context.job)))
        await original(self)

    monkeypatch.setattr(BatchSelection, "commit_again", noting)
    given: dict[str, Any] = {"on_fall": "go_back", "max_staleness": 2}
    loop, job, alerts, _ = await run_with_a_fall(redis_client, tmp_path / "jobs", model_dir, monkeypatch, **given)
    [back] = [alert["back_to"] for alert in alerts if alert["kind"] == "fall_answered"]
    assert (job.status, job.step, len(job.attempts)) == (JobStatus.SUCCEEDED, STEPS, 2)
    _, (num_dispatched, still_open) = found
    assert [group for group in still_open if num_dispatched <= group < FIRST_EVAL_GROUP] == []
    left = {one.version for one in await loop.store.versions.all(job.id) if one.epoch == 1 and one.step > back}
    log = BatchLog(JobDir(loop.job_dir))
    batches = [log.read(at.epoch, at.step) for at in log.steps() if at.epoch > 1]
    assert [batch.step for batch in batches] == list(range(back + 1, STEPS + 1))
    assert not left & {version for batch in batches for one in batch.trajectories for version in one.versions}
    counters = await loop.bus.counters(job.id)
    assert counters["dropped_went_back"] > 0
