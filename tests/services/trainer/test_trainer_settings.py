"""A live change takes effect at a step boundary, is in the log of that step, and survives whatever the job survives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.live_settings import live_values
from gspo_core.log.settings import Tuning, learner_config
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.trainer.building import make_learner
from services.trainer.run import JobRun
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import (
    Fate,
    Killed,
    Life,
    Loop,
    a_loop,
    fingerprint,
    loop_spec,
    plain_loop,
    saved,
    serve,
)

DEADLINE_S = HANG_S
CHANGED_AFTER, KILLED_AFTER = 3, 4
CHANGES = live_values({"optimizer": {"lr": 1e-2}, "objective": {"clip_low": 0.1, "clip_high": 0.1}, "steps": 6})

Hook = Callable[[JobRun, int], Awaitable[None]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hook], None]:
    """Has something done after each step, before the next one begins."""
    original = JobRun._after_step

    def install(hook: Hook) -> None:
        async def hooked(self: JobRun, *args: Any) -> None:
            await original(self, *args)
            await hook(self, self._lineage.step)

        monkeypatch.setattr(JobRun, "_after_step", hooked)

    return install


async def run_until_done(loop: Loop) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await loop.run_of(await loop.claim()).run()


def by_hand(loop: Loop, directory: Path) -> str:
    """A plain loop with one learner for the first steps and its successor, told the new numbers, for the others."""
    until = loop.spec.model_copy(update={"steps": CHANGED_AFTER})
    learner = plain_loop(until, directory)
    tuning = Tuning(loop.spec)
    assert tuning.apply(learner, 1, CHANGES)
    return fingerprint(plain_loop(tuning.spec, directory, learner=learner))


@pytest.mark.parametrize(
    "is_wiped",
    [
        pytest.param(False, id="redis stays", marks=pytest.mark.slow),
        pytest.param(True, id="redis is wiped"),
    ],
)
async def test_a_change_between_checkpoint_and_kill_is_resumed_bit_for_bit(
    redis_client: Redis,
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    after_step: Callable[[Hook], None],
    is_wiped: bool,
) -> None:
    """Checkpoints at step 3 and 6; the change holds from step 4, whose trainer is killed when it is trained."""
    spec = loop_spec(model_dir, checkpoint_every=3)
    life = Life()
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:

        async def change_then_die(_: JobRun, step: int) -> None:
            if step == CHANGED_AFTER:
                await loop.store.jobs.change_settings(loop.job, 0, CHANGES, CHANGES)
            if step == KILLED_AFTER and not life.is_over:
                life.is_over = True
                raise Killed

        after_step(change_then_die)
        with pytest.raises(Killed):
            await loop.run_of(await loop.claim(), guard=partial(Fate(0, 0.0).guard, life)).run()
        if is_wiped:
            await redis_client.flushall()
        await run_until_done(loop)
        applied = [one.data for one in await loop.store.events.read(loop.job) if one.type == "settings.applied"]
    log = BatchLog(JobDir(loop.job_dir))
    held = {step: log.read(epoch, step).extra["settings"] for epoch, step in log.steps()}
    assert {step: settings["version"] for step, settings in held.items()} == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert held[4]["values"] == CHANGES
    assert [(one["step"], one["version"]) for one in applied] == ([] if is_wiped else [(4, 1)])
    assert fingerprint(saved(loop)) == by_hand(loop, tmp_path / "plain")


async def test_without_the_change_the_end_is_another_one(model_dir: Path, tmp_path: Path) -> None:
    """Else the comparison above would say nothing."""
    spec = loop_spec(model_dir, steps=4)
    learner = plain_loop(spec.model_copy(update={"steps": 3}), tmp_path / "a")
    Tuning(spec).apply(learner, 1, {"optimizer.lr": 1e-2})
    assert fingerprint(plain_loop(spec, tmp_path / "a", learner=learner)) != fingerprint(plain_loop(spec, tmp_path))


def test_a_learner_refuses_what_it_was_built_from(model_dir: Path) -> None:
    spec = loop_spec(model_dir)
    learner = make_learner(spec)
    for section, changes in (("optimizer", {"weight_decay": 0.1}), ("objective", {"kl_coef": 0.1})):
        other = spec.model_copy(update={section: getattr(spec, section).model_copy(update=changes)})
        with pytest.raises(ValueError, match="while a learner lives"):
            learner.retune(learner_config(other), other.training_objective)
    assert learner.config == learner_config(spec)


async def test_a_trainer_that_takes_over_keeps_as_much_as_the_settings_say_from_its_first_publication_on(
    redis_client: Redis,
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    after_step: Callable[[Hook], None],
) -> None:
    """Nothing is trained again at an orderly handover, so no log tells it the settings; it trains as if there was
    none."""
    spec = loop_spec(model_dir, checkpoint_every=3, checkpoints={"keep_versions": 2})
    kept = list[int]()
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        weights = WeightStore(JobDir(loop.job_dir))

        async def change_then_leave(run: JobRun, step: int) -> None:
            if step == CHANGED_AFTER:
                changes = CHANGES | {"checkpoints.keep_versions": 50}
                await loop.store.jobs.change_settings(loop.job, 0, changes, changes)
            if step == KILLED_AFTER:
                kept.extend(weights.versions())
                run.phase.leave()

        after_step(change_then_leave)
        await serve(loop)
        applied = [one.data for one in await loop.store.events.read(loop.job) if one.type == "settings.applied"]
        job = await loop.store.jobs.get(loop.job)
    assert [one.code for one in job.attempts] == ["handed_over", "steps_done"]
    assert len(kept) >= 2
    assert set(kept) <= set(weights.versions())
    assert [(one["step"], one["version"]) for one in applied] == [(4, 1), (5, 1)]
    assert fingerprint(saved(loop)) == by_hand(loop, tmp_path / "plain")


async def test_a_step_that_the_settings_keep_for_good_is_saved_when_it_is_trained_again(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer was killed before the checkpoint was written."""
    spec, life = loop_spec(model_dir, checkpoint_every=100, checkpoints={"keep": 1, "keep_versions": 1000}), Life()
    original = JobRun._after_step
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:

        async def change_then_die(run: JobRun, *given: Any) -> None:
            if life.is_over:
                await original(run, *given)
            elif run._lineage.step == 1:
                changes = {"checkpoints.keep_every": 3}
                await loop.store.jobs.change_settings(loop.job, 0, changes, changes)
            elif run._lineage.step == KILLED_AFTER:
                life.is_over = True
                raise Killed

        monkeypatch.setattr(JobRun, "_after_step", change_then_die)
        with pytest.raises(Killed):
            await loop.run_of(await loop.claim(), guard=partial(Fate(0, 0.0).guard, life)).run()
        await run_until_done(loop)
    assert [at.step for at in sorted(CheckpointStore(JobDir(loop.job_dir)).positions())] == [3, 5]
