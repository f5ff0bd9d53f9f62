"""What a whole job says, and how it ends, while nothing moves: the real trainer, on real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.types import Outcome, StopReason
from services.episodes.outbox import to_append
from services.episodes.tree import Ledger
from services.state.fleet_records import WorkerRecord
from services.state.jobs import JobRecord
from services.state.queue import LeasedEpisode
from services.trainer.fleet import engines as engines_module
from services.trainer.run import JobRun
from services.trainer.telling import blockers, unhealthy_environments
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import URL, Hook, Loop, a_loop, after_each_step, loop_spec
from tests.services.trainer.trainer_kit import stop

DEADLINE_S = HANG_S


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
    monkeypatch.setattr(engines_module, "WATCH_S", 0.05)
    monkeypatch.setattr(engines_module, "RETRY_S", 0.05)
    monkeypatch.setattr(blockers, "POLL_S", 0.05)

    def make(**changes: Any) -> Any:
        return a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, **changes), monkeypatch)

    return make


async def seen(loop: Loop, holds: Callable[[JobRecord], bool]) -> JobRecord:
    """The job, once ``holds``."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds(job := await loop.store.jobs.get(loop.job)):
            assert not job.status.is_terminal, job.status_reason
            await asyncio.sleep(0.01)
    return job


def code(job: JobRecord) -> str:
    return job.status_reason.code if job.status_reason else ""


async def register(loop: Loop, **changes: Any) -> None:
    """A rollout worker gives a sign of life, again and again."""
    while True:
        await loop.store.fleet.register_worker(WorkerRecord(id="player", jobs=(loop.job,), **changes))
        await asyncio.sleep(0.05)


async def test_a_job_whose_only_engine_goes_in_its_middle_says_so_and_goes_on_with_it(
    loop_of: Any, hook: list[Hook]
) -> None:
    async with loop_of(steps=3) as loop:

        async def lose_the_engine(_: JobRun, step: int) -> None:
            if step == 1:
                loop.transport.engines["gone"] = loop.transport.engines.pop("engine")

        hook.append(lose_the_engine)
        tasks = [asyncio.create_task(loop.worker().run(end := asyncio.Event())), asyncio.create_task(register(loop))]
        try:
            job = await seen(loop, lambda job: code(job) == "no_engine_for_model" and job.status == "running")
            assert job.status_reason is not None
            assert f"last there: {URL} is gone: " in job.status_reason.message
            loop.transport.engines["engine"] = loop.transport.engines.pop("gone")
            await seen(loop, lambda job: code(job) == "waiting_for_trajectories" or job.step > 1)
            job = await seen(loop, lambda job: job.status.is_terminal)
            assert (job.status, code(job)) == ("succeeded", "steps_done")
            end.set()
            await tasks[0]
        finally:
            for task in tasks:
                await stop(task)


async def test_a_job_whose_environment_never_works_frees_its_trainer(
    loop_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unhealthy_environments, "MIN_PATIENCE_S", 0.3)

    async def never(self: Loop, *args: Any) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(Loop, "_play", never)
    async with loop_of(limits={"reset_timeout_s": 0.3}) as loop:
        ill = {loop.job: {"made:Here": "reset: OSError: no route to host"}}
        tasks = [
            asyncio.create_task(loop.worker().run(end := asyncio.Event())),
            asyncio.create_task(register(loop, ill_environments=ill)),
        ]
        try:
            await seen(loop, lambda job: code(job) == "env_unhealthy")
            job = await seen(loop, lambda job: job.status.is_terminal)
            assert (job.status, code(job)) == ("failed", "environment_failed")
            assert job.status_reason is not None
            assert "player: reset: OSError: no route to host" in job.status_reason.message
            end.set()
            await tasks[0]
        finally:
            for task in tasks:
                await stop(task)


async def test_a_job_whose_environment_worked_once_waits_for_it(
    loop_of: Any, hook: list[Hook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unhealthy_environments, "MIN_PATIENCE_S", 1.0)
    async with loop_of(limits={"reset_timeout_s": 1.0}, steps=2) as loop:
        play, may_play = Loop._play, asyncio.Event()

        async def play_one_episode(self: Loop, *args: Any) -> None:
            if self.played:
                ill[loop.job] = {"made:Here": "reset: OSError: no route to host"}
                await may_play.wait()
                ill.clear()
            await play(self, *args)

        ill: dict[str, dict[str, str]] = {}
        monkeypatch.setattr(Loop, "_play", play_one_episode)
        tasks = [
            asyncio.create_task(loop.worker().run(end := asyncio.Event())),
            asyncio.create_task(register(loop, ill_environments=ill)),
        ]
        try:
            await seen(loop, lambda job: code(job) == "env_unhealthy")
            for _ in range(40):
                await asyncio.sleep(0.05)
                assert code(await loop.store.jobs.get(loop.job)) == "env_unhealthy"
            may_play.set()
            job = await seen(loop, lambda job: job.status.is_terminal)
            assert (job.status, code(job)) == ("succeeded", "steps_done")
            end.set()
            await tasks[0]
        finally:
            for task in tasks:
                await stop(task)


async def test_a_job_whose_prompts_do_not_fit_says_both_numbers(loop_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"prompt_tokens": 5321.0, "context_tokens": 4096.0, "model_context_tokens": 4096.0}

    async def overflow(self: Loop, lease: LeasedEpisode, token: str) -> None:
        outcome = Outcome(StopReason.CONTEXT_OVERFLOW, 0.0, metrics=found)
        await self.bus.append(self.job, token, [to_append(Ledger(lease.key, lease.attempt, 1.0).close(outcome), "")])
        self.played[lease.key.group] += 1

    monkeypatch.setattr(Loop, "_play", overflow)
    async with loop_of() as loop:
        serving = asyncio.create_task(loop.worker().run(end := asyncio.Event()))
        try:
            job = await seen(loop, lambda job: job.status.is_terminal)
            assert (job.status, code(job)) == ("failed", "prompt_too_long")
            assert job.status_reason is not None
            said = (
                "of made:Here has 5,321 tokens; the model's context is 4,096; 8 groups in a row left nothing to train"
            )
            assert job.status_reason.message.endswith(said)
            alerts = [one.data for one in await loop.store.events.read(loop.job) if one.type == "alert"]
            assert [one["kind"] for one in alerts] == ["prompt_too_long"]
            assert len(loop.played) <= 10
            end.set()
            await serving
        finally:
            await stop(serving)
