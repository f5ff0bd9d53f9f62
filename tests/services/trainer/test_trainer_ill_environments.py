"""A running job says that its environment is ill, and that it is well again, on a real server."""

from __future__ import annotations

import pytest

from services.state.fleet_records import WorkerRecord
from services.state.jobs import JobStatus
from services.state.store import Claim, Store
from services.trainer.telling.ill_environments import SILENCE_S, IllEnvironments, complaint_of


class Stage:
    def __init__(self, store: Store, claim: Claim) -> None:
        self.store, self.claim, self.now = store, claim, 0.0
        self.watch = IllEnvironments(store, claim, clock=lambda: self.now)

    async def register(self, worker: str, error: str | None = None) -> None:
        job = self.claim.job_id
        ill = {} if error is None else {job: {"worlds:Away": error}}
        await self.store.fleet.register_worker(WorkerRecord(id=worker, jobs=(job,), ill_environments=ill))

    async def look(self) -> tuple[JobStatus, str, str]:
        await self.watch.look()
        job = await self.store.jobs.get(self.claim.job_id)
        reason = job.status_reason
        return job.status, reason.code if reason else "", reason.message if reason else ""


@pytest.fixture
async def stage(store: Store) -> Stage:
    await store.jobs.create("{}")
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    return Stage(store, claim)


async def test_a_job_says_that_its_environment_is_ill_until_it_is_well_again(stage: Stage) -> None:
    well = await stage.look()
    await stage.register("rollout-0", "connection refused")
    await stage.register("rollout-1")
    said = "worlds:Away fails at 1 of 2 workers; rollout-0: connection refused"
    for _ in range(2):
        assert await stage.look() == (JobStatus.RUNNING, "env_unhealthy", said)
    await stage.register("rollout-0")
    assert await stage.look() == well


async def test_a_worker_that_died_ill_complains_no_more(stage: Stage) -> None:
    well = await stage.look()
    await stage.register("rollout-0", "connection refused")
    for _ in range(3):  # it gives no sign, and is looked at all the while
        assert (await stage.look())[1] == "env_unhealthy"
        stage.now += SILENCE_S / 3
    assert await stage.look() == well


async def test_a_paused_job_stays_paused(stage: Stage) -> None:
    job, token = stage.claim.job_id, stage.claim.token
    for status in (JobStatus.PAUSING, JobStatus.PAUSED):
        await stage.store.jobs.set_status(job, status, token=token)
    await stage.register("rollout-0", "connection refused")
    assert (await stage.look())[0] is JobStatus.PAUSED


def test_what_other_jobs_suffer_from_is_not_said() -> None:
    worker = WorkerRecord(id="w", jobs=("a", "b"), ill_environments={"b": {"x:Y": "gone"}})
    assert complaint_of("a", [worker]) is None
    assert complaint_of("b", [worker, WorkerRecord(id="idle")]) == "x:Y fails at 1 of 1 workers; w: gone"
