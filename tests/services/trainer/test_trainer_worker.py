"""What becomes of a job whose run ends badly, on a real server."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.learner import UnsupportedModel
from gspo_core.spec import JobSpec
from gspo_core.types import Split
from services.state.client import Away, AwayReason, OutOfMemory, RedisFault
from services.state.job_table import JobTable
from services.state.jobs import HANDED_OVER, JobRecord
from services.state.keys import job_key
from services.state.queue import Bus
from services.state.store import Claim, JobStatus, StatusReason, Store
from services.trainer.device import unfit
from services.trainer.queued_models import QueuedModels
from services.trainer.run import JobRun
from services.trainer.telling.failure import RanksLost
from services.trainer.telling.run_phase import RunPhase
from services.trainer.worker import TrainerWorker
from tests.core.test_model_files import write_files
from tests.patience import HANG_S
from tests.services.trainer.trainer_kit import InProcess

DEADLINE_S = HANG_S
INSIDE = "an error inside the service, told in full by the trainer's log: "
MakeRun = Callable[[Claim, JobSpec], JobRun]
SPEC = JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}]})


def worker_of(
    store: Store, name: str, make_run: MakeRun, *, check: Callable[[], None] = lambda: None, **options: Any
) -> TrainerWorker:
    bus = Bus(store._functions.redis)
    return TrainerWorker(store, bus, name, InProcess(store, make_run, check), **options)


class FailingRun(JobRun):
    """Moves the job along ``path``, then raises ``error``; the worker is asked to stop at the same moment."""

    def __init__(
        self, claim: Claim, store: Store, path: list[JobStatus], error: Exception, stop: asyncio.Event
    ) -> None:
        self.phase, self._given = RunPhase(), claim
        self._store, self._path, self._error, self._stop = store, path, error, stop

    async def run(self) -> None:
        for status in self._path:
            await self._store.jobs.set_status(self._given.job_id, status, token=self._given.token)
        self._stop.set()
        raise self._error


async def end_of_a_job_whose_run_raises(store: Store, error: Exception, *path: JobStatus) -> str:
    job = await store.jobs.create(SPEC)
    stop = asyncio.Event()

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        return FailingRun(claim, store, list(path), error, stop)

    async with asyncio.timeout(DEADLINE_S):
        await worker_of(store, "trainer", make_run).run(stop)
    return job.id


async def test_an_error_of_the_run_fails_the_job_and_is_its_reason(store: Store) -> None:
    job = await end_of_a_job_whose_run_raises(store, ValueError("no such thing"), JobStatus.RUNNING)
    record = await store.jobs.get(job)
    assert record.status is JobStatus.FAILED
    assert isinstance(record.status_reason, StatusReason)
    assert record.status_reason.message == INSIDE + "ValueError: no such thing"


async def test_what_breaks_the_queue_does_not_hide_why_the_job_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> list[int]:
        raise RedisFault("user_function:649: Missing bytes in input")

    monkeypatch.setattr(Bus, "open_groups", broken)
    job = await end_of_a_job_whose_run_raises(store, ValueError("the same garbage"), JobStatus.RUNNING)
    record = await store.jobs.get(job)
    assert record.status is JobStatus.FAILED
    assert record.status_reason is not None
    assert record.status_reason.message == INSIDE + "ValueError: the same garbage"


class DamagedRun(JobRun):
    """Meets a record of its own queue that nobody can read."""

    def __init__(self, claim: Claim, store: Store, bus: Bus, redis: Redis) -> None:
        self.phase, self._given = RunPhase(), claim
        self._store, self._bus, self._redis = store, bus, redis

    async def run(self) -> None:
        job, token = self._given.job_id, self._given.token
        await self._store.jobs.set_status(job, JobStatus.RUNNING, token=token)
        await self._bus.dispatch(job, token, 0, size=2, split=Split.TRAIN, task_index=0)
        await self._redis.hset(job_key(job, "groups"), "0", b"\xc1")
        await self._redis.zadd(job_key(job, "ready"), {"0": 1})
        await self._bus.ready_groups(job)


async def test_a_queue_that_cannot_be_read_is_emptied_for_the_next_attempt(
    store: Store, bus: Bus, redis_client: Redis
) -> None:
    job, stop, left = await store.jobs.create(SPEC), asyncio.Event(), list[int]()

    class NextRun(FailingRun):
        async def run(self) -> None:
            left.append(len(await bus.open_groups(job.id)))
            await super().run()

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        if claim.attempt == 1:
            return DamagedRun(claim, store, bus, redis_client)
        return NextRun(claim, store, [JobStatus.RUNNING], ValueError("the end"), stop)

    async with asyncio.timeout(DEADLINE_S):
        await worker_of(store, "trainer", make_run).run(stop)
    attempts = (await store.jobs.get(job.id)).attempts
    assert [one.code for one in attempts] == ["queue_damaged", "internal"]
    assert "group 0" in str(attempts[0].message)
    assert left == [0]


async def test_a_redis_that_was_away_fails_no_job(store: Store, new_client: Callable[[], Redis]) -> None:
    clock = [0.0]
    job = await end_of_a_job_whose_run_raises(store, Away(AwayReason.UNREACHABLE), JobStatus.RUNNING)
    assert (await store.jobs.get(job)).status is JobStatus.RUNNING
    heir = Store(new_client(), lease_s=10.0, clock=lambda: clock[0])
    claim = None
    for second in range(0, 20, 4):
        clock[0] = second
        claim = claim or await heir.jobs.claim("heir")
    assert claim is not None
    assert claim.job_id == job


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Away(AwayReason.UNREACHABLE), "redis_unavailable"),
        (OutOfMemory(AwayReason.OOM, "command not allowed when used memory > 'maxmemory'."), "redis_unavailable"),
        (Away(AwayReason.READONLY, "You can't write against a read only replica."), "redis_unavailable"),
        (Away(AwayReason.MISCONF, "Errors writing to the AOF file: No space left on device"), "redis_unavailable"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_what_passes_never_fails_a_job_however_often_it_comes(
    redis_client: Redis, error: Exception, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is free again as soon as that can be said, and no attempt counts."""
    monkeypatch.setattr("services.process.cancelling.CLEANING_UP_S", 0.2)
    store = Store(redis_client, max_attempts=2)
    await store.load_functions()
    for number in range(4):
        if number == 0:
            job = await end_of_a_job_whose_run_raises(store, error, JobStatus.RUNNING)
        else:
            stop = asyncio.Event()
            run = partial(FailingRun, store=store, path=[], error=error, stop=stop)
            async with asyncio.timeout(DEADLINE_S):
                await worker_of(store, "trainer", lambda claim, _spec, run=run: run(claim)).run(stop)  # type: ignore[misc]
    record = await store.jobs.get(job)
    assert [(one.code, one.ended_at is None) for one in record.attempts] == [(cause, False)] * 4
    assert not record.status.is_terminal


async def test_a_job_that_could_not_be_released_is_released_when_redis_is_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.process.cancelling.CLEANING_UP_S", 0.2)

    class Once(JobTable):
        """The first release gets no reply."""

        num_asked = 0

        async def release(self, job: str, token: str, cause: StatusReason = HANDED_OVER) -> None:
            self.num_asked += 1
            if self.num_asked == 1:
                raise Away(AwayReason.UNREACHABLE)
            await super().release(job, token, cause)

    away = Store(store._functions.redis)
    away.jobs.__class__ = Once
    job, stop, claims = await store.jobs.create(SPEC), asyncio.Event(), list[Claim]()

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        claims.append(claim)
        is_last = len(claims) == 2
        error = ValueError("the end") if is_last else Away(AwayReason.UNREACHABLE)
        return FailingRun(claim, store, [JobStatus.RUNNING], error, stop if is_last else asyncio.Event())

    async with asyncio.timeout(DEADLINE_S):
        await worker_of(away, "trainer", make_run).run(stop)
    assert [one.attempt for one in claims] == [1, 2], "no lease had to run out"
    record = await store.jobs.get(job.id)
    assert [one.code for one in record.attempts] == ["redis_unavailable", "internal"]


async def ended(store: Store, worker: TrainerWorker, job: str, stop: asyncio.Event) -> JobRecord:
    """The job as the worker leaves it, when it is over."""
    running = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(DEADLINE_S):
        while not (record := await store.jobs.get(job)).status.is_terminal:
            await asyncio.sleep(0.01)
    stop.set()
    await running
    return record


async def test_a_specification_of_another_release_ends_the_job_with_the_reason(store: Store) -> None:
    job, stop = await store.jobs.create('{"model": "m", "another": 1}'), asyncio.Event()
    worker = worker_of(store, "trainer", lambda _claim, _spec: pytest.fail("nothing to run"))
    record = await ended(store, worker, job.id, stop)
    assert record.status is JobStatus.FAILED
    assert record.status_reason is not None
    assert record.status_reason.code == "incompatible_release"
    assert "another" in record.status_reason.message


# Jobs that are for other trainers

NEEDS_GPU = JobSpec.model_validate({**SPEC.model_dump(mode="json"), "resources": {"device": "cuda"}})


async def test_a_job_that_this_trainer_cannot_serve_is_left_to_others(store: Store) -> None:
    waiting, other = await store.jobs.create(NEEDS_GPU), await store.jobs.create(SPEC)
    for _ in range(2):
        await store.jobs.claim("cpu", unfit=partial(unfit, has_gpu=False))
    record = await store.jobs.get(waiting.id)
    assert (record.status, record.attempt) == (JobStatus.QUEUED, 0)
    assert record.status_reason is not None
    assert record.status_reason.code == "capacity"
    assert "a trainer with a GPU" in record.status_reason.message
    assert len([event for event in await store.events.read(waiting.id) if event.type == "job.status"]) == 2
    assert (await store.jobs.get(other.id)).attempt == 1
    claim = await store.jobs.claim("gpu")
    assert claim is not None
    assert claim.job_id == waiting.id


async def test_a_job_waits_for_ranks_that_can_be_divided_as_it_asks(store: Store) -> None:
    data = SPEC.model_dump(mode="json") | {"learner": {"context_parallel": 2}}
    waiting = await store.jobs.create(JobSpec.model_validate(data))
    assert await store.jobs.claim("one", unfit=partial(unfit, has_gpu=False, num_ranks=1)) is None
    said = await why(store, waiting.id)
    assert said.code == "capacity"
    assert "learner.context_parallel: 2 does not divide the number of ranks, 1" in said.message
    assert await store.jobs.claim("four", unfit=partial(unfit, has_gpu=False, num_ranks=4)) is not None


async def why(store: Store, job: str) -> StatusReason:
    reason = (await store.jobs.get(job)).status_reason
    assert reason is not None
    return reason


async def test_a_queued_job_says_that_its_model_is_missing_until_it_comes(store: Store, tmp_path: Path) -> None:
    model = tmp_path / "model"
    data = SPEC.model_dump(mode="json") | {"model": str(model)}
    waiting = await store.jobs.create(JobSpec.model_validate(data))
    other = await store.jobs.create(JobSpec.model_validate(data | {"resources": {"device": "cuda"}}))
    queued = QueuedModels(store, "trainer-0", partial(unfit, has_gpu=False))
    before = await why(store, waiting.id)
    for _ in range(2):
        await queued.look()
    assert (await store.jobs.get(waiting.id)).status is JobStatus.QUEUED
    said = await why(store, waiting.id)
    assert said.code == "model_invalid"
    assert said.message.startswith(f"there is no directory {model} (where trainer-0 runs)")
    assert len([event for event in await store.events.read(waiting.id) if event.type == "job.status"]) == 2
    assert (await why(store, other.id)).code == "waiting_for_workers"
    model.mkdir()
    write_files(model)
    await queued.look()
    after = await why(store, waiting.id)
    assert (after.code, after.message) == (before.code, before.message)


async def test_a_busy_trainer_looks_at_the_models_of_the_jobs_behind(store: Store) -> None:
    told, stop = asyncio.Event(), asyncio.Event()

    class BusyRun(FailingRun):
        async def run(self) -> None:
            while (await why(self._store, behind.id)).code != "model_invalid":
                await asyncio.sleep(0.02)
            told.set()
            await super().run()

    first = await store.jobs.create(SPEC)
    behind = await store.jobs.create(SPEC)

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        return BusyRun(claim, store, [], UnsupportedModel("no Hugging Face model directory"), stop)

    async with asyncio.timeout(DEADLINE_S):
        await worker_of(store, "trainer", make_run).run(stop)
    assert told.is_set()
    assert (await store.jobs.get(first.id)).status is JobStatus.FAILED
    said = await why(store, first.id)
    assert (said.code, said.message) == ("model_invalid", "no Hugging Face model directory")


async def test_whoever_comes_ends_a_cancelled_job_that_nobody_can_serve(store: Store) -> None:
    job, stop = await store.jobs.create(NEEDS_GPU), asyncio.Event()
    claim = await store.jobs.claim("gpu")
    assert claim is not None
    await store.jobs.set_desired_state(job.id, "cancelled")
    await store.jobs.release(job.id, claim.token)

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        return FailingRun(claim, store, [], RuntimeError("no such device"), stop)

    worker = worker_of(store, "cpu", make_run, unfit=lambda _: "it needs a GPU")
    assert (await ended(store, worker, job.id, stop)).status is JobStatus.CANCELLED


async def test_trouble_with_another_job_does_not_end_ones_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asyncio.Event()

    async def troubled(own: str) -> list[str]:
        looked.set()
        raise PermissionError("the directory of another job")

    class RunThatSeesIt(FailingRun):
        async def run(self) -> None:
            await looked.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            await super().run()

    monkeypatch.setattr(store.jobs, "give_up_lost", troubled)
    job, stop = await store.jobs.create(SPEC), asyncio.Event()

    def make_run(claim: Claim, _spec: JobSpec) -> JobRun:
        return RunThatSeesIt(claim, store, [JobStatus.RUNNING], ValueError("its own"), stop)

    async with asyncio.timeout(DEADLINE_S):
        await worker_of(store, "trainer", make_run).run(stop)
    reason = (await store.jobs.get(job.id)).status_reason
    assert reason is not None
    assert reason.message == INSIDE + "ValueError: its own"


async def test_a_job_that_cannot_be_failed_does_not_end_the_process(store: Store) -> None:
    """The table of transitions leads from ``paused`` to no failure."""
    path = JobStatus.RUNNING, JobStatus.PAUSING, JobStatus.PAUSED
    job = await end_of_a_job_whose_run_raises(store, ValueError("while paused"), *path)
    assert (await store.jobs.get(job)).status is JobStatus.PAUSED


@pytest.mark.parametrize(("lease_s", "beat_s"), [(30.0, 2.0), (5.0, 1.0)])
def test_beats_come_at_least_every_fifth_of_the_lease(store: Store, lease_s: float, beat_s: float) -> None:
    worker = worker_of(store, "trainer", lambda _claim, _spec: pytest.fail("nothing to run"), lease_s=lease_s)
    assert worker.beat_s == beat_s


async def test_a_trainer_is_listed_with_what_it_can_for_as_long_as_it_runs(store: Store) -> None:
    stop = asyncio.Event()
    worker = worker_of(store, "trainer", lambda _claim, _spec: pytest.fail("no job"), capabilities={"device": "cpu"})
    running = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(DEADLINE_S):
        while not (listed := await store.fleet.trainers()):
            await asyncio.sleep(0.01)
    assert [(one.id, one.kind, one.device) for one in listed] == [("trainer", "trainer", "cpu")]
    stop.set()
    await running
    assert await store.fleet.trainers() == []


async def test_a_trainer_that_lost_a_rank_ends_the_attempt_and_its_process(store: Store) -> None:
    """The job is free at once, for the ranks that are started again."""
    job, lost = await store.jobs.create(SPEC), list[RanksLost]()

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
            await worker_of(store, "trainer", make_run, check=check).run(asyncio.Event())
    record = await store.jobs.get(job.id)
    assert [one.code for one in record.attempts] == ["rank_lost"]
    heir = await store.jobs.claim("heir")
    assert heir is not None
    assert heir.job_id == job.id
