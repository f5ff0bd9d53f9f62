"""A job whose trainer has gone says so although no other trainer is there, and can be cancelled."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from services.api.http.presence import Presence
from services.api.http.unattended import Unattended
from services.state.fleet_records import TrainerRecord
from services.state.jobs import CancelManner, StatusReason
from services.state.store import Claim, Store

pytestmark = pytest.mark.every_server

LEASE_S = 30.0


class Api:
    """One that looks, on a clock of its own."""

    def __init__(self, redis: Redis) -> None:
        self.now = 1000.0
        self.store = Store(redis, lease_s=LEASE_S, clock=self.clock)
        self.unattended = Unattended(self.store, Presence(self.store, LEASE_S, self.clock), LEASE_S, self.clock)

    def clock(self) -> float:
        return self.now

    async def watch(self, leases: float) -> None:
        for _ in range(round(leases * 10)):
            await self.unattended.look()
            self.now += LEASE_S / 10

    async def reason(self, job: str) -> StatusReason:
        reason = (await self.store.jobs.get(job)).status_reason
        assert reason is not None
        return reason


@pytest.fixture
def api(redis_client: Redis) -> Api:
    return Api(redis_client)


@pytest.fixture
async def running(store: Store, claim: Claim) -> Claim:
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    await store.jobs.update_progress(claim.job_id, claim.token, 7, 7)
    return claim


async def test_a_job_whose_only_trainer_was_killed_says_so_within_two_leases(api: Api, running: Claim) -> None:
    await api.watch(2)
    job = await api.store.jobs.get(running.job_id)
    assert job.status == "running"
    assert job.attempts[-1].code == "trainer_lost"
    reason = await api.reason(running.job_id)
    assert reason.code == "no_trainer"
    assert f"when {job.attempts[-1].trainer} was lost: start one, and it goes on from step 7" in reason.message


async def test_a_job_that_was_handed_over_to_nobody_says_so(api: Api, running: Claim) -> None:
    await api.store.jobs.release(running.job_id, running.token)
    await api.watch(0.5)
    assert (await api.reason(running.job_id)).code == "waiting_for_trajectories"  # another one may be about to take it
    await api.watch(0.2)
    assert "left it (handed_over): start one" in (await api.reason(running.job_id)).message


async def test_who_is_alive_loses_nothing(api: Api, running: Claim) -> None:
    for _ in range(30):
        await api.watch(0.1)
        await api.store.jobs.beat(running.job_id, running.token)
    assert (await api.reason(running.job_id)).code == "waiting_for_trajectories"


async def test_a_trainer_that_has_another_job_is_told_of(api: Api, running: Claim) -> None:
    for _ in range(20):
        await api.store.fleet.register_trainer(TrainerRecord(id="busy"))
        await api.watch(0.1)
    reason = await api.reason(running.job_id)
    assert reason.code == "no_trainer"
    assert "1 is there and has not taken it yet" in reason.message


async def test_a_waiting_job_says_whether_there_is_any_trainer(api: Api) -> None:
    job = await api.store.jobs.create("{}")
    await api.watch(1)
    reason = await api.reason(job.id)
    assert (reason.code, reason.message) == ("no_trainer", "no trainer is there: start one, and it begins")
    await api.store.fleet.register_trainer(TrainerRecord(id="new"))
    await api.watch(0.1)
    assert (await api.reason(job.id)).code == "waiting_for_workers"


async def test_who_takes_the_job_is_not_talked_over(api: Api, running: Claim) -> None:
    await api.watch(2)
    heir = await api.store.jobs.claim("heir")
    assert heir is not None
    assert not await api.store.jobs.explain_unowned(running.job_id, StatusReason("no_trainer", "nobody"))
    await api.watch(0.5)
    assert (await api.reason(running.job_id)).code == "loading_model"


async def test_a_job_without_a_trainer_is_cancelled_at_once(api: Api, running: Claim) -> None:
    await api.store.jobs.release(running.job_id, running.token)
    job = await api.store.jobs.set_desired_state(running.job_id, "cancelled")
    assert (job.status, job.finished_at is None) == ("cancelled", False)
    assert not await api.store.jobs.explain_unowned(running.job_id, StatusReason("no_trainer", "nobody"))


async def test_a_job_that_was_cancelled_while_its_trainer_died_is_cancelled(api: Api, running: Claim) -> None:
    job = await api.store.jobs.set_desired_state(running.job_id, "cancelled")
    assert job.status == "running"
    await api.watch(2)
    assert (await api.store.jobs.get(running.job_id)).status == "cancelled"


async def test_what_is_to_be_drained_waits_for_a_trainer(api: Api, running: Claim) -> None:
    await api.store.jobs.release(running.job_id, running.token)
    await api.store.jobs.set_desired_state(running.job_id, "cancelled", CancelManner.DRAIN)
    await api.watch(2)
    assert (await api.store.jobs.get(running.job_id)).status == "running"
    assert (await api.reason(running.job_id)).code == "no_trainer"


async def test_a_paused_job_needs_no_trainer(api: Api, running: Claim) -> None:
    for status in ("pausing", "paused"):
        await api.store.jobs.set_desired_state(running.job_id, "paused")
        await api.store.jobs.set_status(running.job_id, status, token=running.token)
    await api.store.jobs.release(running.job_id, running.token)
    await api.watch(2)
    assert (await api.reason(running.job_id)).code == "user_paused"
    await api.store.jobs.set_desired_state(running.job_id, "running")
    await api.watch(2)
    assert (await api.reason(running.job_id)).code == "no_trainer"
