"""Every step that was trained is reported, once, whoever died before he had."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.position import Position
from gspo_core.versions import StepReport, WeightFile, WeightsManifest
from services.files.job_dir import JobDir, JobsDir
from services.files.job_records import JobRecords
from services.state.keys import job_key
from services.state.reports import MetricSeries
from services.state.store import Claim, Fenced, Store
from services.trainer.past.recovery import version_of
from services.trainer.run import JobRun
from services.trainer.telling.reports import Reports
from tests.core.learner_support import write_model
from tests.services.trainer.loop_kit import DEADLINE_S, Fate, Loop, a_loop, loop_spec, serve, serve_although_killed
from tests.services.trainer.trainer_kit import stop

STEPS = list(range(1, 6))
# What only clocks and engines know is missing of a step that is reported from its log.
TIMED = ("time/", "throughput/", "engine/", "disk/", "selection/", "dropped/")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


async def rows_of(loop: Loop) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in await loop.store.metrics.read(loop.job)}


async def events_of(loop: Loop) -> list[int]:
    return [event.data["step"] for event in await loop.store.events.read(loop.job, count=1000) if event.type == "step"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
async def test_no_step_is_missing_from_a_curve_and_none_is_there_twice(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    fate = Fate(seed, 0.05)
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir), monkeypatch) as loop:
        num_trainers = await serve_although_killed(loop, fate, set())
        assert num_trainers > 3, fate.points
        assert sorted(await rows_of(loop)) == STEPS
        assert await events_of(loop) == STEPS


def lines_of(loop: Loop) -> list[int]:
    return [row["step"] for row in JobRecords(JobDir(loop.job_dir)).metrics() if "version" in row]


def hanging_at(patch: pytest.MonkeyPatch, where: str) -> asyncio.Event:
    """The report of step 3 hangs for ever, once: before anything is told, or before its line is in the file."""
    reached, original = asyncio.Event(), MetricSeries.report

    async def hangs(self: MetricSeries, job: str, at: Position, *given: Any, **named: Any) -> None:
        is_due = at.step == 3 and not reached.is_set()
        if where == "file" or not is_due:
            await original(self, job, at, *given, **named)
        if is_due:
            reached.set()
            await asyncio.Event().wait()

    patch.setattr(MetricSeries, "report", hangs)
    return reached


async def hang_in(loop: Loop, reached: asyncio.Event) -> None:
    """A trainer that is ended when it hangs there."""
    claim = await loop.claim()
    lost = asyncio.create_task(loop.run_of(claim).run())
    async with asyncio.timeout(DEADLINE_S):
        await reached.wait()
    await stop(lost)
    await loop.store.jobs.release(loop.job, claim.token)


@pytest.mark.parametrize("before", ["all", "file"])
@pytest.mark.parametrize("every", [1, 100])
async def test_a_trainer_that_ends_before_it_has_reported_is_made_up_for(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, before: str, every: int
) -> None:
    """Before its numbers, or between them and their line; a checkpoint of a step is not there before its report."""
    reached = hanging_at(monkeypatch, before)
    spec = loop_spec(model_dir, checkpoint_every=every)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await hang_in(loop, reached)
        await serve(loop)
        rows, events = await rows_of(loop), await events_of(loop)
        assert sorted(rows) == events == lines_of(loop) == STEPS
    untimed = {name for name in rows[4] if not name.startswith(TIMED)}
    assert untimed <= rows[3].keys(), untimed - rows[3].keys()


async def test_no_checkpoint_hides_a_step_that_was_not_reported(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is due while steps are trained again, by a trainer that ends right after."""
    reached = hanging_at(monkeypatch, "all")
    again, original = asyncio.Event(), JobRun._name_weights

    async def hangs(self: JobRun, learner: Any) -> None:
        if reached.is_set() and not again.is_set():
            again.set()
            await asyncio.Event().wait()
        await original(self, learner)

    monkeypatch.setattr(JobRun, "_name_weights", hangs)
    spec = loop_spec(model_dir, checkpoint_every=3)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await hang_in(loop, reached)
        await hang_in(loop, again)
        await serve(loop)
        assert sorted(await rows_of(loop)) == await events_of(loop) == lines_of(loop) == STEPS


class Told:
    """What is told of one job by trainers that follow each other."""

    def __init__(self, store: Store, claim: Claim, job_dir: JobDir) -> None:
        self.store, self.claim, self.job_dir = store, claim, job_dir

    def reports(self) -> Reports:
        return Reports(self.store, self.claim, self.job_dir)

    async def rewards(self) -> dict[int, float]:
        return {row["step"]: row["reward/mean"] for row in await self.store.metrics.read(self.claim.job_id)}

    def lines(self) -> list[int]:
        return [row["step"] for row in JobRecords(self.job_dir).metrics() if "step" in row and "reward/mean" in row]

    async def events(self) -> list[tuple[int, int]]:
        found = await self.store.events.read(self.claim.job_id, count=1000)
        return [(event.data["epoch"], event.data["step"]) for event in found if event.type == "step"]


def report(epoch: int, step: int, reward: float) -> StepReport:
    looked_at = dict.fromkeys(("groups/total", "groups/zero_variance"), 0.0)  # by alarms
    return StepReport(step, step, epoch, {"reward/mean": reward, **looked_at})


@pytest.fixture
def told(store: Store, claim: Claim, tmp_path: Path) -> Told:
    job_dir = JobsDir(tmp_path).job(claim.job_id)
    job_dir.path.mkdir()
    return Told(store, claim, job_dir)


async def test_a_step_that_is_trained_another_way_is_told_as_it_went_then(told: Told) -> None:
    """The job went back to step 1, and its trainer ended before it had reported step 2 of the new history."""
    for step in (1, 2, 3):
        await told.reports().step(report(1, step, step / 10), ())
    missed = [report(1, 1, 0.1), report(2, 2, 0.9), report(2, 3, 0.8)]
    for _ in range(2):
        await told.reports().missed(missed)
        assert await told.rewards() == {1: 0.1, 2: 0.9, 3: 0.8}
        assert await told.events() == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]


@pytest.mark.parametrize("marked", [False, True])
async def test_what_an_earlier_release_has_told_is_not_told_again(told: Told, marked: bool) -> None:
    """It leaves no mark, or the one of a newer trainer before it."""
    for step in (1, 2):
        await told.reports().step(report(1, step, 0.1), ())
    mark = {"reported_step": 1} if marked else {}
    redis, key = told.store.metrics._redis, job_key(told.claim.job_id, "job")
    await redis.hdel(key, "reported_epoch", "reported_step")
    await redis.delete(job_key(told.claim.job_id, "event_nonces"))  # nor does it name its events so
    if marked:
        await redis.hset(key, mapping=mark | {"reported_epoch": 1})
    await told.reports().missed([report(1, step, 0.1) for step in (1, 2, 3)])
    assert await told.events() == [(1, 1), (1, 2), (1, 3)]
    assert told.lines() == [1, 2, 3]


async def test_a_server_that_was_rolled_back_is_told_again_and_the_file_is_not(told: Told) -> None:
    for step in (1, 2):
        await told.reports().step(report(1, step, 0.1), ())
    redis, job = told.store.metrics._redis, told.claim.job_id
    await redis.hset(job_key(job, "job"), "reported_step", 1)
    await redis.hdel(job_key(job, "metrics"), 2)
    await redis.zrem(job_key(job, "metric_steps"), 2)
    await redis.delete(job_key(job, "events"), job_key(job, "event_nonces"))
    await told.reports().missed([report(1, 2, 0.1)])
    assert await told.rewards() == {1: 0.1, 2: 0.1}
    assert await told.events() == [(1, 2)]
    assert told.lines() == [1, 2]


async def test_no_line_of_the_file_keeps_a_trainer_from_its_job(told: Told) -> None:
    """Whatever is in it; what was cut off costs only its own line."""
    odd = [{"version": 1}, {"version": 1, "epoch": [1], "step": 1}, {"version": 1, "epoch": "1", "step": 1}, [], 3]
    text = "".join(json.dumps(one) + "\n" for one in odd) + '{"version": 1, "epo'
    told.job_dir.metrics.write_text(text)
    await told.reports().missed([report(1, 1, 0.1)])
    assert told.lines() == [1]
    assert await told.events() == [(1, 1)]


async def test_what_has_lost_its_job_writes_no_line(told: Told) -> None:
    await told.reports().step(report(1, 1, 0.1), ())
    told.job_dir.metrics.unlink()
    await told.store.jobs.release(told.claim.job_id, told.claim.token)
    with pytest.raises(Fenced):
        await told.reports().missed([report(1, 1, 0.1)])
    assert told.lines() == []


def test_a_step_is_told_with_the_version_of_its_own_history() -> None:
    def published(version: int, epoch: int, step: int) -> WeightsManifest:
        return WeightsManifest("j", version, epoch, step, (WeightFile("a", 1, "0" * 64),))

    versions = [published(1, 1, 6), published(2, 1, 7), published(3, 3, 6), published(4, 4, 8), published(5, 5, 8)]
    assert version_of(Position(1, 7), versions, 9) == 2
    assert version_of(Position(3, 7), versions, 9) == 9  # what was left at step 7 is something else
    assert version_of(Position(3, 8), versions, 9) == 4  # published by its successor


async def test_a_server_that_was_wiped_knows_again_what_was_told(redis_client: Redis, tmp_path: Path) -> None:
    jobs_dir = JobsDir(tmp_path)
    store = Store(redis_client, jobs_dir=jobs_dir)
    await store.load_functions()
    job = await store.jobs.create("{}")
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    told = Told(store, claim, jobs_dir.job(job.id))
    for step in (1, 3, 2):  # lines that were missed come late
        await told.reports()._tell_files(report(1, step, step / 10))
    await redis_client.flushall()
    await store.load_functions()
    assert (await store.jobs.get(job.id)).id == job.id
    assert await store.metrics.reported(job.id) == Position(1, 3)
    assert await told.rewards() == {1: 0.1, 2: 0.2, 3: 0.3}
