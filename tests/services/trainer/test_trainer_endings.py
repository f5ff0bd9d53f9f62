"""Every way out of a job ends in a terminal state that says why, with what the user wanted to keep."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.job_dir import JobDir
from services.state.jobs import CancelManner, JobRecord, StatusReason
from services.trainer import run
from services.trainer.run import JobRun
from services.trainer.telling.run_phase import Phase, RunPhase
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
from tests.services.trainer.trainer_kit import stop

DEADLINE_S = HANG_S
STEPS = 4

# The others take as long and differ in nothing that is shown elsewhere.
EVERY_MANNER = pytest.mark.parametrize(
    "manner",
    [
        CancelManner.DRAIN_WITH_CHECKPOINT,
        *(pytest.param(one, marks=pytest.mark.slow) for one in list(CancelManner)[:3]),
    ],
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    return after_each_step(monkeypatch)


@pytest.fixture
def loop_of(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        given = {"steps": STEPS, "checkpoint_every": 100, "rollout": {"group_size": 3, "max_staleness": 1}}
        return a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, **(given | changes)), monkeypatch)

    return make


async def end_of(loop: Loop) -> JobRecord:
    """One trainer's process after the other, until the job is over."""
    end = asyncio.Event()
    worker = loop.worker()
    serving = asyncio.create_task(worker.run(end))
    async with asyncio.timeout(DEADLINE_S):
        while not (job := await loop.store.jobs.get(loop.job)).status.is_terminal and not serving.done():
            await asyncio.sleep(0.02)
        end.set()
        await serving
    assert await loop.bus.open_groups(loop.job) == []
    counts = await loop.bus.counters(loop.job)
    assert counts["dispatched"] == sum(count for name, count in counts.items() if name != "dispatched")
    return job


def told(job: JobRecord) -> tuple[str, str]:
    assert job.status_reason is not None
    return str(job.status), job.status_reason.code


def checkpoints(loop: Loop) -> list[int]:
    return [one.position.step for one in CheckpointStore(JobDir(loop.job_dir)).newest_first()]


async def test_all_steps_are_done(loop_of: Any) -> None:
    async with loop_of(steps=2) as loop:
        job = await end_of(loop)
    assert (told(job), job.step, checkpoints(loop)) == (("succeeded", "steps_done"), 2, [2])
    assert [(one.code, one.step) for one in job.attempts] == [("steps_done", 2)]


@pytest.mark.parametrize(
    ("stop", "code", "step"),
    [
        ({"reward": {"at_least": 0.0, "times": 2}}, "reward_reached", 2),
        ({"no_progress": {"values": 1, "min_gain": 1.0}}, "reward_stands_still", 2),
        ({"wall_time_s": 1e-3}, "time_over", 0),
    ],
)
async def test_a_condition_ends_the_job_in_order(loop_of: Any, stop: dict[str, Any], code: str, step: int) -> None:
    async with loop_of(stop=stop) as loop:
        job = await end_of(loop)
    assert (told(job), job.step) == (("succeeded", code), step)
    assert checkpoints(loop) == [step]


@pytest.mark.slow
async def test_conditions_that_are_not_met_end_nothing(loop_of: Any) -> None:
    never = {"reward": {"at_least": 1.1}, "no_progress": {"values": 50}, "wall_time_s": 1e6}
    async with loop_of(steps=2, stop=never) as loop:
        assert told(await end_of(loop)) == ("succeeded", "steps_done")


async def test_a_condition_may_come_while_the_job_runs_and_knows_what_was_before(
    loop_of: Any, hook: list[Hook]
) -> None:
    async with loop_of() as loop:
        values = {"stop.reward": {"at_least": 0.0, "times": 3}}

        async def tell(_: JobRun, step: int) -> None:
            if step == 3:
                await loop.store.jobs.change_settings(loop.job, 0, values, values)

        hook.append(tell)
        job = await end_of(loop)
    assert (told(job), job.step) == (("succeeded", "reward_reached"), 3)


@pytest.mark.parametrize(
    ("manner", "last_step", "kept"),
    [
        (CancelManner.NOW, {0, 1}, []),  # a step counts once its weights are out
        pytest.param(CancelManner.NOW_WITH_CHECKPOINT, {1}, [1], marks=pytest.mark.slow),
        pytest.param(CancelManner.DRAIN, {2, 3}, [], marks=pytest.mark.slow),
        (CancelManner.DRAIN_WITH_CHECKPOINT, {2, 3}, [2, 3]),
    ],
)
async def test_a_running_job_is_cancelled_as_it_was_asked(
    loop_of: Any, hook: list[Hook], manner: CancelManner, last_step: set[int], kept: list[int]
) -> None:
    """Two steps' worth of groups are under way at any moment: a drain trains these and no more."""
    async with loop_of(steps=50) as loop:

        async def cancel(run: JobRun, step: int) -> None:
            if step == 1:
                await loop.store.jobs.set_desired_state(loop.job, "cancelled", manner)
                while manner is CancelManner.NOW or run.phase.manner is None:  # until the worker has seen it
                    await asyncio.sleep(0.01)

        hook.append(cancel)
        job = await end_of(loop)
    assert told(job) == ("cancelled", "user_cancelled")
    assert job.step in last_step
    assert checkpoints(loop) == [step for step in kept if step == job.step]
    assert bool(kept) == bool(checkpoints(loop))


async def test_the_wish_is_seen_again_while_what_shall_be_kept_is_saved(
    loop_of: Any, hook: list[Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_again = asyncio.Event()
    wind_up, checkpoint = RunPhase.cancel, JobRun._checkpoint

    def watched(self: RunPhase, manner: CancelManner) -> None:
        if self.manner is not None and self.phase is Phase.CLOSING:
            seen_again.set()
        wind_up(self, manner)

    async def late(self: JobRun, *args: Any) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await seen_again.wait()
        await checkpoint(self, *args)

    monkeypatch.setattr(RunPhase, "cancel", watched)
    monkeypatch.setattr(JobRun, "_checkpoint", late)
    async with loop_of(steps=50) as loop:

        async def cancel(run: JobRun, step: int) -> None:
            if step == 1:
                await loop.store.jobs.set_desired_state(loop.job, "cancelled", CancelManner.NOW_WITH_CHECKPOINT)
                while run.phase.manner is None:
                    await asyncio.sleep(0.01)

        hook.append(cancel)
        job = await end_of(loop)
    assert (told(job), job.step, checkpoints(loop)) == (("cancelled", "user_cancelled"), 1, [1])


async def test_a_drain_that_takes_too_long_can_be_cut_short(loop_of: Any, hook: list[Hook]) -> None:
    async with loop_of(steps=50) as loop:

        async def cancel_twice(run: JobRun, step: int) -> None:
            await loop.store.jobs.set_desired_state(loop.job, "cancelled", CancelManner.DRAIN)
            while run.phase.manner is None or (await loop.store.jobs.get(loop.job)).step < step:
                await asyncio.sleep(0.01)  # a step that was not reported yet is lost with "now"
            await loop.store.jobs.set_desired_state(loop.job, "cancelled", CancelManner.NOW)
            await asyncio.Event().wait()

        hook.append(cancel_twice)
        job = await end_of(loop)
    assert (told(job), job.step) == (("cancelled", "user_cancelled"), 1)


@pytest.mark.parametrize("gave_way", [False, True])
async def test_a_cancelled_job_that_has_no_trainer_is_saved_as_it_was_asked(
    loop_of: Any, monkeypatch: pytest.MonkeyPatch, gave_way: bool
) -> None:
    """No checkpoint was due: what was trained is in logs alone. The wish is seen while these are read."""
    seen, wind_up, recover = threading.Event(), RunPhase.cancel, run.recover

    def watched(self: RunPhase, manner: CancelManner) -> None:
        seen.set()
        wind_up(self, manner)

    def late(*args: Any, **options: Any) -> Any:
        assert args[3] == 1 or seen.wait(DEADLINE_S)
        time.sleep(0.2)  # whoever is ended for the wish is ended in here
        return recover(*args, **options)

    monkeypatch.setattr(RunPhase, "cancel", watched)
    monkeypatch.setattr(run, "recover", late)
    async with loop_of(steps=50) as loop:
        claim = await loop.claim()
        lost = asyncio.create_task(loop.run_of(claim).run())
        async with asyncio.timeout(DEADLINE_S):
            while (await loop.store.jobs.get(loop.job)).step < 2:
                assert not lost.done(), lost.result()
                await asyncio.sleep(0.01)
        await stop(lost)
        if gave_way:
            await loop.store.jobs.yield_trainer(loop.job, claim.token, StatusReason("yielded", "others wait"))
        else:
            await loop.store.jobs.release(loop.job, claim.token)
        assert checkpoints(loop) == []
        await loop.store.jobs.set_desired_state(loop.job, "cancelled", CancelManner.NOW_WITH_CHECKPOINT)
        job = await end_of(loop)
    assert told(job) == ("cancelled", "user_cancelled")
    assert checkpoints(loop) == [BatchLog(JobDir(loop.job_dir)).steps()[-1][1]]


async def test_a_job_that_waits_for_its_batch_pauses_at_once(
    loop_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose environments hang; it goes on to the same end."""
    may_play, play = asyncio.Event(), Loop._play

    async def late(self: Loop, *args: Any) -> None:
        await may_play.wait()
        await play(self, *args)

    monkeypatch.setattr(Loop, "_play", late)
    async with loop_of(rollout={"group_size": 3, "max_staleness": 0}) as loop:
        ending = asyncio.create_task(end_of(loop))
        async with asyncio.timeout(DEADLINE_S):
            while (await loop.store.jobs.get(loop.job)).status != "running":
                await asyncio.sleep(0.02)
            await loop.store.jobs.set_desired_state(loop.job, "paused")
            while (await loop.store.jobs.get(loop.job)).status != "paused":
                assert not ending.done()
                await asyncio.sleep(0.02)
        assert BatchLog(JobDir(loop.job_dir)).steps() == []
        await loop.store.jobs.set_desired_state(loop.job, "running")
        may_play.set()
        job = await ending
    assert told(job) == ("succeeded", "steps_done")
    assert fingerprint(saved(loop)) == fingerprint(plain_loop(loop.spec, tmp_path))


@EVERY_MANNER
async def test_a_paused_job_is_cancelled_in_every_manner(loop_of: Any, hook: list[Hook], manner: CancelManner) -> None:
    async with loop_of(steps=50) as loop:

        async def pause(_: JobRun, step: int) -> None:
            if step == 1:
                await loop.store.jobs.set_desired_state(loop.job, "paused")

        async def cancel_once_paused() -> None:
            while (await loop.store.jobs.get(loop.job)).status != "paused":
                await asyncio.sleep(0.02)
            await loop.store.jobs.set_desired_state(loop.job, "cancelled", manner)

        hook.append(pause)
        cancelling = asyncio.create_task(cancel_once_paused())
        job = await end_of(loop)
        await cancelling
    assert told(job) == ("cancelled", "user_cancelled")


@EVERY_MANNER
async def test_a_job_that_waits_for_its_environments_is_cancelled_in_every_manner(
    loop_of: Any, monkeypatch: pytest.MonkeyPatch, manner: CancelManner
) -> None:
    async with loop_of(environments=[{"ref": "made:Here"}, {"ref": "no:Worker"}]) as loop:

        async def cancel_once_waiting() -> None:
            while (reason := (await loop.store.jobs.get(loop.job)).status_reason) is None or reason.code != (
                "waiting_for_workers"
            ):
                await asyncio.sleep(0.02)
            while (await loop.store.jobs.get(loop.job)).status != "starting":
                await asyncio.sleep(0.02)
            await loop.store.jobs.set_desired_state(loop.job, "cancelled", manner)

        cancelling = asyncio.create_task(cancel_once_waiting())
        job = await end_of(loop)
        await cancelling
    assert (told(job), checkpoints(loop)) == (("cancelled", "user_cancelled"), [])


async def test_an_error_fails_the_job_with_its_cause(loop_of: Any, hook: list[Hook]) -> None:
    async def fail(_: JobRun, step: int) -> None:
        raise ValueError("no such thing")

    async with loop_of() as loop:
        hook.append(fail)
        job = await end_of(loop)
    assert told(job) == ("failed", "internal")
    assert job.attempts[-1].code == "internal"
