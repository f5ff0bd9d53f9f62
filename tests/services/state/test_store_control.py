"""What the store keeps of a user's control over a job: live settings, the manner of a cancellation, attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.types import Split
from services.files.job_dir import JobsDir
from services.state.jobs import CancelManner, IllegalTransition, JobStatus, StatusReason
from services.state.queue import Bus
from services.state.refusals import Conflict, Fenced
from services.state.store import Claim, Store

LR = {"optimizer.lr": 0.5}


@pytest.fixture
async def store(redis_client: Redis, tmp_path: Path) -> Store:
    store = Store(redis_client, jobs_dir=JobsDir(tmp_path / "jobs"))
    await store.load_functions()
    return store


# Live settings


async def test_changes_are_numbered_told_and_kept(store: Store, claim: Claim) -> None:
    job = claim.job_id
    assert ((await store.jobs.get(job)).settings_version, (await store.jobs.get(job)).settings) == (0, {})
    await store.jobs.change_settings(job, 0, LR, LR)
    changed = await store.jobs.change_settings(job, 1, {**LR, "objective.k3_gate": None}, {"objective.k3_gate": None})
    assert (changed.settings_version, changed.settings) == (2, {**LR, "objective.k3_gate": None})
    told = [event.data for event in await store.events.read(job) if event.type == "settings.changed"]
    assert told == [{"version": 1, "changes": LR}, {"version": 2, "changes": {"objective.k3_gate": None}}]


async def test_who_has_not_seen_the_newest_change_changes_nothing(store: Store, claim: Claim) -> None:
    await store.jobs.change_settings(claim.job_id, 0, LR, LR)
    with pytest.raises(Conflict):
        await store.jobs.change_settings(claim.job_id, 0, {"steps": 3}, {"steps": 3})
    assert (await store.jobs.get(claim.job_id)).settings == LR


async def test_a_change_that_is_sent_again_is_one_change(store: Store, claim: Claim) -> None:
    for _ in range(2):
        await store.jobs.change_settings(claim.job_id, 0, LR, LR)
    assert (await store.jobs.get(claim.job_id)).settings_version == 1
    assert sum(event.type == "settings.changed" for event in await store.events.read(claim.job_id)) == 1


async def test_a_job_that_is_over_cannot_be_changed(store: Store, claim: Claim) -> None:
    await store.jobs.set_status(claim.job_id, "failed", token=claim.token)
    with pytest.raises(IllegalTransition):
        await store.jobs.change_settings(claim.job_id, 0, LR, LR)


async def test_all_of_it_outlives_redis(
    store: Store, claim: Claim, redis_client: Redis, new_client: Callable[[], Redis], tmp_path: Path
) -> None:
    await store.jobs.change_settings(claim.job_id, 0, LR, LR)
    await store.jobs.set_desired_state(claim.job_id, "cancelled", CancelManner.DRAIN_WITH_CHECKPOINT)
    before = await store.jobs.get(claim.job_id)
    assert before.attempts
    await redis_client.flushall()
    assert await Store(new_client(), jobs_dir=JobsDir(tmp_path / "jobs")).jobs.get(claim.job_id) == before


# How a job is cancelled


@pytest.mark.parametrize("manner", CancelManner)
async def test_only_a_trainer_that_fits_drains_or_saves(store: Store, claim: Claim, manner: CancelManner) -> None:
    job = claim.job_id
    await store.jobs.set_status(job, JobStatus.RUNNING, token=claim.token)
    await store.jobs.update_progress(job, claim.token, 7, 8)
    await store.jobs.set_desired_state(job, "cancelled", manner)
    await store.jobs.release(job, claim.token)
    ends_here = await store.jobs.claim("small", unfit=lambda _: "too large")
    assert (ends_here is not None) == (manner is CancelManner.NOW)
    assert ends_here is not None or await store.jobs.claim("fitting") is not None


async def test_a_drain_can_be_hurried_and_not_taken_back(store: Store, claim: Claim) -> None:
    for manner in (CancelManner.DRAIN, CancelManner.DRAIN, CancelManner.NOW):
        assert (await store.jobs.set_desired_state(claim.job_id, "cancelled", manner)).cancel_manner is manner
    wishes = [event for event in await store.events.read(claim.job_id) if event.data["desired_state"] == "cancelled"]
    assert len(wishes) == 2
    with pytest.raises(IllegalTransition):
        await store.jobs.set_desired_state(claim.job_id, "running")


@pytest.mark.parametrize("manner", [one for one in CancelManner if one is not CancelManner.NOW])
@pytest.mark.parametrize("has_begun", ["nothing", "a step", "a group", "reopened"])
async def test_a_queued_job_that_has_begun_waits_for_the_trainer_that_drains_it(
    store: Store, bus: Bus, claim: Claim, has_begun: str, manner: CancelManner
) -> None:
    job = claim.job_id
    await store.jobs.set_status(job, JobStatus.RUNNING, token=claim.token)
    if has_begun == "a group":
        await bus.dispatch(job, claim.token, 0, size=1, split=Split.TRAIN, task_index=0)
    elif has_begun != "nothing":
        await store.jobs.update_progress(job, claim.token, 7, 7)
    if has_begun == "reopened":
        await store.jobs.set_status(job, JobStatus.SUCCEEDED, token=claim.token)
        record = await store.jobs.get(job)
        await store.jobs.reopen(record, epoch=record.epoch + 1, settings={"steps": 200}, went_back=None)
    else:
        await store.jobs.yield_trainer(job, claim.token, StatusReason("yielded", "others wait"))
    cancelled = await store.jobs.set_desired_state(job, "cancelled", manner)
    if has_begun == "nothing":
        assert cancelled.status == "cancelled"
        return
    assert (cancelled.status, cancelled.desired_state, cancelled.cancel_manner) == ("queued", "cancelled", manner)
    assert len(await bus.groups(job)) == (has_begun == "a group")
    again = await store.jobs.claim("another")
    assert again is not None
    assert (again.job_id, (await store.jobs.get(job)).cancel_manner) == (job, manner)
    await store.jobs.yield_trainer(job, again.token, StatusReason("yielded", "others wait"))
    assert (await store.jobs.set_desired_state(job, "cancelled", CancelManner.NOW)).status == "cancelled"


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_every_manner_says_what_it_does(drain: bool, checkpoint: bool) -> None:
    manner = CancelManner.of(drain=drain, checkpoint=checkpoint)
    assert (manner.drains, manner.saves) == (drain, checkpoint)


# Attempts


async def test_every_attempt_is_listed_with_what_ended_it(store: Store) -> None:
    job = (await store.jobs.create("{}")).id
    first = await store.jobs.claim("a")
    assert first is not None
    await store.jobs.set_status(job, "running", token=first.token)
    await store.jobs.release(job, first.token)
    second = await store.jobs.claim("b")
    assert second is not None
    await store.jobs.update_progress(job, second.token, 4, 4)
    await store.jobs.end_attempt(job, second.token, StatusReason("no_progress", "nothing moved"))
    third = await store.jobs.claim("c")
    assert third is not None
    await store.jobs.set_status(job, "failed", token=third.token, reason=StatusReason("internal", "broken"))
    attempts = (await store.jobs.get(job)).attempts
    assert [(one.attempt, one.epoch, one.trainer, one.code, one.step) for one in attempts] == [
        (1, 1, "a", "handed_over", 0),
        (2, 2, "b", "no_progress", 4),
        (3, 3, "c", "internal", 4),
    ]
    assert all(one.began_at and one.ended_at for one in attempts)


async def test_a_lost_trainer_is_the_cause_of_its_end(redis_client: Redis, tmp_path: Path) -> None:
    clock = [0.0]
    store = Store(redis_client, lease_s=10.0, clock=lambda: clock[0], jobs_dir=JobsDir(tmp_path))
    await store.load_functions()
    job = (await store.jobs.create("{}")).id
    assert await store.jobs.claim("lost")
    heir = None
    for second in range(0, 30, 4):
        clock[0] = second
        heir = heir or await store.jobs.claim("heir")
    assert heir is not None
    assert [(one.trainer, one.code) for one in (await store.jobs.get(job)).attempts] == [
        ("lost", "trainer_lost"),
        ("heir", None),
    ]


async def test_attempts_that_end_themselves_are_used_up(store: Store) -> None:
    job = (await store.jobs.create("{}")).id
    for _ in range(3):
        claim = await store.jobs.claim("t")
        assert claim is not None
        await store.jobs.set_status(job, "running", token=claim.token)
        await store.jobs.end_attempt(job, claim.token, StatusReason("no_progress", "nothing moved"))
    assert await store.jobs.claim("t") is None
    record = await store.jobs.get(job)
    assert (record.status, len(record.attempts)) == ("failed", 3)
    assert record.status_reason is not None
    assert record.status_reason.code == "max_attempts_exceeded"


async def test_who_lost_the_job_ends_no_attempt(store: Store, claim: Claim) -> None:
    await store.jobs.release(claim.job_id, claim.token)
    assert await store.jobs.claim("heir") is not None
    with pytest.raises(Fenced):
        await store.jobs.end_attempt(claim.job_id, claim.token, StatusReason("no_progress", "nothing moved"))


async def test_the_list_of_attempts_is_bounded(store: Store) -> None:
    job = (await store.jobs.create("{}")).id
    for _ in range(25):
        claim = await store.jobs.claim("t")
        assert claim is not None
        await store.jobs.release(job, claim.token)
    assert [one.attempt for one in (await store.jobs.get(job)).attempts] == list(range(6, 26))
