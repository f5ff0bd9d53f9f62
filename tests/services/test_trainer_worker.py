"""What becomes of a job whose run ends badly, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gspo_core.spec import JobSpec
from services.store import Claim, JobStatus, StatusReason, Store
from services.trainer.followers import RanksLost
from services.trainer.run import JobRun
from services.trainer.worker import TrainerWorker

DEADLINE_S = 10.0
SPEC = JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}]})


class FailingRun(JobRun):
    """Moves the job along ``path``, then raises ``error``; the worker is asked to stop at the same moment."""

    def __init__(
        self, claim: Claim, store: Store, path: list[JobStatus], error: Exception, stop: asyncio.Event
    ) -> None:
        self._claim, self._store, self._path, self._error, self._stop = claim, store, path, error, stop

    async def run(self) -> None:
        for status in self._path:
            await self._store.set_status(self._claim.job_id, status, token=self._claim.token)
        self._stop.set()
        raise self._error

    async def discard_queue(self) -> None: ...


async def end_of_a_job_whose_run_raises(store: Store, error: Exception, *path: JobStatus) -> str:
    job = await store.create_job(SPEC)
    stop = asyncio.Event()

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        return FailingRun(claim, store, list(path), error, stop)

    async with asyncio.timeout(DEADLINE_S):
        await TrainerWorker(store, "trainer", make_run).run(stop)
    return job.id


async def test_an_error_of_the_run_fails_the_job_and_is_its_reason(store: Store) -> None:
    job = await end_of_a_job_whose_run_raises(store, ValueError("no such thing"), JobStatus.RUNNING)
    record = await store.get_job(job)
    assert record.status is JobStatus.FAILED
    assert isinstance(record.status_reason, StatusReason)
    assert record.status_reason.message == "ValueError: no such thing"


async def test_a_redis_that_was_away_fails_no_job(store: Store, new_client: Callable[[], Redis]) -> None:
    clock = [0.0]
    job = await end_of_a_job_whose_run_raises(store, RedisConnectionError("away"), JobStatus.RUNNING)
    assert (await store.get_job(job)).status is JobStatus.RUNNING
    heir = Store(new_client(), lease_s=10.0, clock=lambda: clock[0])
    claim = None
    for second in range(0, 20, 4):
        clock[0] = second
        claim = claim or await heir.claim_job("heir")
    assert claim is not None
    assert claim.job_id == job


async def test_a_job_that_cannot_be_failed_does_not_end_the_process(store: Store) -> None:
    """The table of transitions leads from ``paused`` to no failure."""
    path = JobStatus.RUNNING, JobStatus.PAUSING, JobStatus.PAUSED
    job = await end_of_a_job_whose_run_raises(store, ValueError("while paused"), *path)
    assert (await store.get_job(job)).status is JobStatus.PAUSED


@pytest.mark.parametrize(("lease_s", "beat_s"), [(30.0, 2.0), (5.0, 1.0)])
def test_beats_come_at_least_every_fifth_of_the_lease(store: Store, lease_s: float, beat_s: float) -> None:
    worker = TrainerWorker(store, "trainer", lambda _claim, _spec: pytest.fail("nothing to run"), lease_s=lease_s)
    assert worker.beat_s == beat_s


async def test_a_trainer_is_listed_with_what_it_can_for_as_long_as_it_runs(store: Store) -> None:
    stop = asyncio.Event()
    worker = TrainerWorker(
        store, "trainer", lambda _claim, _spec: pytest.fail("no job"), capabilities={"device": "cpu"}
    )
    running = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(DEADLINE_S):
        while not (listed := await store.trainers()):
            await asyncio.sleep(0.01)
    assert [(one["id"], one["kind"], one["device"]) for one in listed] == [("trainer", "trainer", "cpu")]
    stop.set()
    await running
    assert await store.trainers() == []


async def test_a_trainer_that_lost_a_rank_ends_the_attempt_and_its_process(store: Store) -> None:
    """The job is free at once, for the ranks that are started again."""
    job, lost = await store.create_job(SPEC), list[RanksLost]()

    class Losing(FailingRun):
        async def run(self) -> None:
            lost.append(RanksLost("rank 1 is gone"))
            raise lost[0]

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        return Losing(claim, store, [], ValueError(), asyncio.Event())

    def check() -> None:
        if lost:
            raise lost[0]

    with pytest.raises(RanksLost):
        async with asyncio.timeout(DEADLINE_S):
            await TrainerWorker(store, "trainer", make_run, check=check).run(asyncio.Event())
    record = await store.get_job(job.id)
    assert [one.code for one in record.attempts] == ["rank_lost"]
    heir = await store.claim_job("heir")
    assert heir is not None
    assert heir.job_id == job.id
