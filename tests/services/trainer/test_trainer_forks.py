"""A fork begins exactly where its parent stood; fed its parent's batches it is an experiment on the same data."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.learner import Learner
from gspo_core.log.changes import Without
from gspo_core.position import Position
from gspo_core.replay.past import NotKept, Past
from gspo_core.replay.question import ReplayQuestion
from gspo_core.replay.replaying import replay
from gspo_core.spec import JobSpec
from services.files.batch_log import BatchLog
from services.files.checkpoints import CheckpointStore
from services.files.erasing import erase, of_member
from services.files.job_dir import JobDir
from services.files.origin import plan
from services.state.jobs import CancelManner
from services.trainer.groups.admission import Admission
from services.trainer.run import JobRun
from tests.core.learner_support import write_model
from tests.patience import HANG_S
from tests.services.trainer.loop_kit import (
    Loop,
    a_loop,
    child_spec,
    fingerprint,
    fork_of,
    loop_spec,
    make_learner,
    plain_loop,
    saved,
    serve,
)
from tests.services.trainer.trainer_kit import stop

pytestmark = pytest.mark.usefixtures("warm_children")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def files_of(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@contextlib.asynccontextmanager
async def played(loop: Loop) -> AsyncIterator[None]:
    task = asyncio.create_task(loop.play(), name="player of the fork")
    try:
        yield
    finally:
        await stop(task)


def ask_after(patch: pytest.MonkeyPatch, child: Loop, step: int, state: str, **how: Any) -> list[int]:
    """Want ``state`` of a fork while it takes the step after this one; returns where that was asked."""
    original, asked = JobRun._step_on, list[int]()

    async def taken(run: JobRun, *args: Any) -> None:
        await original(run, *args)
        if run._lineage.step == step and not asked:
            asked.append(step)
            job = await child.store.jobs.set_desired_state(child.job, state, **how)
            assert job.desired_state == state
            if "manner" in how:
                run.phase.cancel(how["manner"])

    patch.setattr(JobRun, "_step_on", taken)
    return asked


@pytest.mark.parametrize("step", [2, 3])
async def test_a_fork_with_nothing_changed_goes_where_its_parent_went(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """From a checkpoint, and from between two. The prompt of a group is a function of its number: the cursor in the
    data came along."""
    spec = loop_spec(model_dir, steps=5)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        before = files_of(loop.job_dir)
        child = await fork_of(loop, child_spec(loop, step))
        async with played(child):
            await serve(child)
    assert files_of(loop.job_dir) == before
    assert fingerprint(saved(child)) == fingerprint(saved(loop))
    assert fingerprint(saved(child)) == fingerprint(plain_loop(spec, tmp_path / "plain"))
    assert [at.step for at in BatchLog(JobDir(child.job_dir)).steps()] == list(range(step + 1, 6))


async def test_a_fork_with_another_rate_leaves_its_parent_byte_for_byte(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=4)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        before = files_of(loop.job_dir)
        child = await fork_of(loop, child_spec(loop, 2, optimizer={"lr": 1e-4}, steps=5))
        async with played(child):
            await serve(child)
    assert files_of(loop.job_dir) == before
    assert fingerprint(saved(child)) != fingerprint(saved(loop))


@pytest.mark.parametrize("step", [0, pytest.param(2, marks=pytest.mark.slow), 3])
async def test_a_fork_that_is_fed_its_parents_batches_ends_at_its_parents_weights(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    spec = loop_spec(model_dir, steps=5)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        num_played = sum(loop.played.values())
        child = await fork_of(loop, child_spec(loop, step, same_batches=True))
        await serve(child)
        assert sum(loop.played.values()) == num_played
        rows = await loop.store.metrics.read(child.job)
    assert fingerprint(saved(child)) == fingerprint(saved(loop))
    assert [row["step"] for row in rows] == list(range(step + 1, 6))
    answer = replay(Past(child.job_dir), ReplayQuestion(4, 5))
    assert answer.is_same
    assert [len(one.versions) for one in answer.steps] == [1, 1]


async def test_a_fork_that_is_fed_is_paused_between_two_steps(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=5), monkeypatch) as loop:
        await serve(loop)
        child = await fork_of(loop, child_spec(loop, 0, same_batches=True))
        asked = ask_after(monkeypatch, child, 2, "paused")
        serving = asyncio.create_task(serve(child))
        async with asyncio.timeout(HANG_S):
            while (job := await loop.store.jobs.get(child.job)).status != "paused" or job.step < 2:  # told later
                await asyncio.sleep(0.02)
        assert (asked, job.step) == ([2], 2)
        await loop.store.jobs.set_desired_state(child.job, "running")
        await serving
    assert fingerprint(saved(child)) == fingerprint(saved(loop))


@pytest.mark.parametrize("manner", [CancelManner.NOW_WITH_CHECKPOINT, CancelManner.DRAIN_WITH_CHECKPOINT])
async def test_a_fork_that_is_fed_saves_its_step_before_it_is_cancelled(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, manner: CancelManner
) -> None:
    """A drain takes no more steps either: what its parent had under way at that step is not under way."""
    spec = loop_spec(model_dir, steps=5, rollout={"group_size": 3, "max_staleness": 1})
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        child = await fork_of(loop, child_spec(loop, 0, same_batches=True, checkpoint_every=100))
        ask_after(monkeypatch, child, 3, "cancelled", manner=manner)
        await serve(child, ends="cancelled")
    assert [at.step for at in CheckpointStore(JobDir(child.job_dir)).positions()] == [3]


async def test_when_its_parents_batches_are_used_up_a_fork_samples_its_own(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=4)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        child = await fork_of(loop, child_spec(loop, 2, same_batches=True, steps=6))
        async with played(child):
            await serve(child)
    longer = JobSpec.model_validate(spec.model_dump() | {"steps": 6})
    assert fingerprint(saved(child)) == fingerprint(plain_loop(longer, tmp_path / "plain"))


async def test_a_fork_is_fed_its_parents_batches_without_a_group_and_then_samples_its_own(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first step it goes where a replay without that group says that it would."""
    spec = loop_spec(model_dir, steps=5)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        theirs = BatchLog(JobDir(loop.job_dir))
        fed = Past(loop.job_dir).batch(3)
        culprit, member = fed.groups[0].group, fed.groups[1].trajectories[0].key
        without = [f"{culprit}", f"{member.group}/{member.member}"]
        child = await fork_of(loop, child_spec(loop, 2, same_batches=True, fed={"last": 3, "without": without}))
        async with played(child):
            await serve(child)
        before = Past(loop.job_dir).batch(3)
    ours = Past(child.job_dir)
    assert [group.group for group in ours.batch(3).groups] == [group.group for group in fed.groups[1:]]
    assert member not in {one.key for one in ours.batch(3).trajectories}
    assert ours.batch(4).trajectories[0].key.job == child.job, "after that it plays"
    assert culprit not in {group.group for step in (4, 5) for group in ours.batch(step).groups}, "it is owed no more"
    assert ours.batch(3).extra["dropped"] == {"left_out": [culprit]}
    assert [group.group for group in before.groups] == [group.group for group in fed.groups]
    otherwise = replay(Past(loop.job_dir), ReplayQuestion(3, 3, without=Without.parse(without)))
    [row] = [one for one in await loop.store.metrics.read(child.job) if one["step"] == 3]
    assert otherwise.losses_otherwise[0] == row["gspo/loss"]
    assert theirs.steps() == BatchLog(JobDir(loop.job_dir)).steps()


async def test_a_fork_whose_last_fed_step_is_published_late_plays_on_all_the_same(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is not published, a job without staleness admits nothing on top."""
    spec = loop_spec(model_dir, steps=4, rollout={"group_size": 3, "max_staleness": 0})
    original, admit, has_admitted = JobRun._publish_step, Admission.admit, asyncio.Event()

    async def admits_once(admission: Admission) -> None:
        await admit(admission)
        has_admitted.set()

    async def late(run: JobRun, *args: Any, admits: bool = True) -> None:
        if not admits:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(has_admitted.wait(), 3)  # a slow disk
        await original(run, *args, admits=admits)

    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        monkeypatch.setattr(JobRun, "_publish_step", late)
        monkeypatch.setattr(Admission, "admit", admits_once)
        child = await fork_of(loop, child_spec(loop, 2, same_batches=True, fed={"last": 3}))
        async with played(child):
            await serve(child)
    assert Past(child.job_dir).batch(4).trajectories[0].key.job == child.job


@pytest.mark.parametrize(("size", "steps"), [(1, 9), (4, 5)])
async def test_a_fork_may_take_other_numbers_of_groups(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, size: int, steps: int
) -> None:
    """Its parent had started more groups than such steps take by then, or fewer."""
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        child = await fork_of(loop, child_spec(loop, 3, groups_per_step=size, steps=steps))
        async with played(child):
            await serve(child)
    ours, num_before = Past(child.job_dir), sum(len(Past(loop.job_dir).batch(step).groups) for step in (1, 2, 3))
    assert [len(ours.batch(step).groups) for step in ours.batches] == [size] * (steps - 3)
    assert ours.batch(steps).extra["num_dispatched"] == num_before + size * (steps - 3)


async def test_a_fork_that_is_fed_nothing_to_train_fails_with_the_reason(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rewards are all the same, and it drops such groups."""
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        fed = [one.key for step in (3, 4) for one in Past(loop.job_dir).batch(step).trajectories]
        spec = child_spec(loop, 2, same_batches=True, objective={"advantage": {"zero_variance": "drop"}})
        child = await fork_of(loop, spec, {(key.group, key.member): 1.0 for key in fed})
        await serve(child, ends="failed")
        job = await loop.store.jobs.get(child.job)
    assert job.status_reason is not None
    assert job.status_reason.code == "all_rewards_equal"
    assert "fed for step 3" in job.status_reason.message


async def test_what_was_erased_is_fed_to_no_fork_that_does_not_leave_it_out(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before it is made, and one that leaves the episode out trains that step, and again."""
    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        theirs, key = JobDir(loop.job_dir), Past(loop.job_dir).batch(4).trajectories[0].key
        erase(theirs, loop.job, of_member(key.group, key.member), {}, safe_until=None)
        with pytest.raises(NotKept, match=rf"{key.group}/{key.member}: a fork can leave them out, or be fed .* step 3"):
            plan(theirs, 2, same_batches=True)
        assert plan(theirs, 2, last=3, same_batches=True).ahead == (3,)
        without = [f"{key.group}/{key.member}"]
        child = await fork_of(loop, child_spec(loop, 2, same_batches=True, fed={"without": without}))
        await serve(child)
    assert replay(Past(child.job_dir), ReplayQuestion(4, 4)).is_same


async def test_a_fork_needs_its_parent_no_more(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=5)
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
        there = fingerprint(saved(loop))
        child = await fork_of(loop, child_spec(loop, 3, same_batches=True))
        shutil.rmtree(loop.job_dir)
        await serve(child)
    assert fingerprint(saved(child)) == there


async def test_no_learner_stands_beside_the_one_that_trains_again(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may have the memory of one: what a fork begins with is written before its learner is made."""
    found = list[list[Position]]()

    def make() -> Learner:
        found.append(CheckpointStore(JobDir(child.job_dir)).positions())
        return make_learner(child.spec)

    async with a_loop(redis_client, tmp_path / "jobs", loop_spec(model_dir, steps=4), monkeypatch) as loop:
        await serve(loop)
        child = await fork_of(loop, child_spec(loop, 3, same_batches=True))
        await serve(child, make)
    assert found == [[Position(0, 3)]]


async def test_a_plan_says_what_is_trained_again(
    redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = loop_spec(model_dir, steps=5, checkpoints={"keep": 9, "keep_versions": 1000})
    async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
        await serve(loop)
    found = plan(JobDir(loop.job_dir), 3)
    assert (found.start, found.num_replayed, found.ahead) == ((1, 2), 1, (4, 5))
    with pytest.raises(NotKept, match="leads to step 9"):
        plan(JobDir(loop.job_dir), 9)
    assert CheckpointStore(JobDir(loop.job_dir)).forks() == {1: (0, 0)}
