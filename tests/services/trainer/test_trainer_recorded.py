"""A job that is trained on what another has played: the same tokens, log-probs and versions. Nobody plays for it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.codec import encode
from gspo_core.learner import Learner
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.recording import NoSuchEpisode
from gspo_core.replay.audit import audit
from gspo_core.replay.past import NotKept, Past
from gspo_core.replay.replaying import ReplayQuestion, replay
from gspo_core.spec import JobSpec
from services.files.batch_log import BatchLog
from services.files.erasing import erase, of_member
from services.files.job_dir import JobDir
from services.files.origin import bring
from services.files.recording import Rewards, bring_recording, recorded_steps
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import (
    Fate,
    Loop,
    a_loop,
    fingerprint,
    loop_spec,
    make_learner,
    saved,
    serve,
    serve_although_killed,
)

pytestmark = pytest.mark.usefixtures("warm_children")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def spec_on(source: Loop, first: int, last: int, **changes: Any) -> JobSpec:
    recorded = {"job": source.job, "first": first, "last": last}
    given = source.spec.model_dump() | {"recorded": recorded, "steps": last - first + 1}
    return JobSpec.model_validate(given | changes)


async def trained_on(source: Loop, spec: JobSpec, rewards: Rewards | None = None) -> Loop:
    """As the API makes it: what it is trained on is brought before it is accepted."""
    job = f"{source.job}r"
    ours, at = JobDir(source.job_dir.parent / job), spec.recorded
    assert at is not None
    theirs = JobDir(source.job_dir)
    bring_recording(theirs, ours, recorded_steps(theirs, at.first, at.last), rewards or {})
    await source.store.jobs.create(spec.model_dump_json(), job_id=job)
    return replace(source, job=job, job_dir=ours.path, spec=spec)


def batches_of(loop: Loop) -> list[LoggedBatch]:
    log = BatchLog(JobDir(loop.job_dir))
    return [log.read(*at) for at in log.steps()]


def payload_of(batch: LoggedBatch) -> list[bytes]:
    return [encode(replace(segment, outcome=None)) for one in batch.trajectories for segment in one.segments[:-1]]


async def test_as_they_are_they_lead_where_they_led(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the model on, with the same settings: bit for bit. No engine is asked, and no episode played."""
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        num_played = sum(loop.played.values())
        job = await trained_on(loop, spec_on(loop, 1, 4))
        shutil.move(loop.job_dir, tmp_path / "gone")
        await serve(job)
        assert sum(loop.played.values()) == num_played
        bound = [one.job for one in await loop.store.fleet.engines()]
        rows = await loop.store.metrics.read(job.job)
    assert job.job not in bound
    assert fingerprint(saved(job)) == fingerprint(saved(replace(loop, job_dir=tmp_path / "gone")))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    shutil.move(tmp_path / "gone", loop.job_dir)
    assert list(map(payload_of, batches_of(job))) == list(map(payload_of, batches_of(loop)))
    assert [one.extra["recorded"] for one in batches_of(job)] == [[1, 1], [1, 2], [1, 3], [1, 4]]
    assert replay(Past(job.job_dir), ReplayQuestion(1, 4)).is_same
    assert audit(Past(job.job_dir), job.job).foreign_steps == [1, 2, 3, 4]


async def test_with_other_rewards_they_lead_elsewhere(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        before = batches_of(loop)[2]
        rewards = {(group.group, 1): -7.0 for group in before.groups}
        job = await trained_on(loop, spec_on(loop, 3, 4, optimizer={"lr": 1e-3}), rewards)
        await serve(job)
    third, fourth = batches_of(job)
    assert payload_of(third) == payload_of(before)
    assert third.extra["staleness"] == before.extra["staleness"]
    assert third.extra["rescored"] == [list(member) for member in sorted(rewards)]
    assert {one.reward for one in third.trajectories if one.key.member == 1} == {-7.0}
    assert [one.reward for one in fourth.trajectories] == [one.reward for one in batches_of(loop)[3].trajectories]
    assert fingerprint(saved(job)) != fingerprint(saved(loop))
    assert replay(Past(job.job_dir), ReplayQuestion(1, 2)).is_same


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
async def test_it_goes_on_wherever_its_trainer_died(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        job = await trained_on(loop, spec_on(loop, 1, 4))
        deaths = await serve_although_killed(job, Fate(seed, 0.1), set())
    assert deaths > 1
    assert fingerprint(saved(job)) == fingerprint(saved(loop))


async def test_it_can_be_paused_and_cancelled_at_a_step(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=3), monkeypatch) as loop:
        await serve(loop)
        job = await trained_on(loop, spec_on(loop, 1, 3))
        here = asyncio.get_running_loop()

        def make() -> Learner:
            pausing = loop.store.jobs.set_desired_state(job.job, "paused")
            asyncio.run_coroutine_threadsafe(pausing, here).result()
            return make_learner(job.spec)

        serving = asyncio.create_task(serve(job, make, ends="cancelled"))
        async with asyncio.timeout(HANG_S):
            while (await loop.store.jobs.get(job.job)).status != "paused":
                await asyncio.sleep(0.02)
        assert (await loop.store.jobs.get(job.job)).step == 0
        await loop.store.jobs.set_desired_state(job.job, "cancelled")
        await serving


async def test_a_fork_may_be_fed_with_other_rewards(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins where its parent stood, whose files stay as they are."""
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        theirs, before = JobDir(loop.job_dir), batches_of(loop)
        rewards = {(group.group, 0): 9.0 for group in before[3].groups}
        at = {"job": loop.job, "step": 3, "same_batches": True, "rewards": "0" * 64}
        spec = JobSpec.model_validate(loop.spec.model_dump() | {"parent": at})
        assert spec.parent is not None
        ours = JobDir(loop.job_dir.parent / "fork")
        with pytest.raises(NoSuchEpisode, match="there is no episode 0/0 in the steps"):
            bring(theirs, ours, spec.parent, {(0, 0): 1.0})
        bring(theirs, ours, spec.parent, rewards)
        await loop.store.jobs.create(spec.model_dump_json(), job_id="fork")
        fork = replace(loop, job="fork", job_dir=ours.path, spec=spec)
        await serve(fork)
    assert list(map(payload_of, batches_of(loop))) == list(map(payload_of, before))
    assert [one.reward for one in batches_of(loop)[3].trajectories] == [one.reward for one in before[3].trajectories]
    [fed] = batches_of(fork)
    assert {one.reward for one in fed.trajectories if one.key.member == 0} == {9.0}
    assert fingerprint(saved(fork)) != fingerprint(saved(loop))
    assert replay(Past(fork.job_dir), ReplayQuestion(4, 4)).is_same


async def test_what_is_erased_where_it_was_played_is_erased_where_it_was_trained_again(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=2), monkeypatch) as loop:
        await serve(loop)
        job = await trained_on(loop, spec_on(loop, 1, 2))
        await serve(job)
        key = batches_of(loop)[0].trajectories[0].key
        others = {one.job: JobDir(one.job_dir) for one in (loop, job)}
        found = erase(JobDir(loop.job_dir), loop.job, of_member(key.group, key.member), others, safe_until=None)
    assert {(one.job, one.step) for one in found.erased} == {(loop.job, 1), (job.job, 1)}
    ours = JobDir(job.job_dir)
    for folder in (JobDir(loop.job_dir), ours, ours.recorded):
        log = BatchLog(folder)
        assert log.read(*log.steps()[0]).erased == {(key.group, key.member)}
    later = await _again(loop)
    assert (key.group, key.member) not in {(one.key.group, one.key.member) for one in later}


async def _again(loop: Loop) -> Any:
    """What another job would be trained on after that."""
    theirs, ours = JobDir(loop.job_dir), JobDir(loop.job_dir.parent / "later")
    bring_recording(theirs, ours, recorded_steps(theirs, 1, 2), {})
    return BatchLog(ours.recorded).read(1, 1).trajectories


def test_steps_that_are_not_kept_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotKept, match="no batch log"):
        recorded_steps(JobDir(tmp_path), None, None)
