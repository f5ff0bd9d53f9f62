"""Jobs in the store: created once, listed in order, moved only along the table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from services.state.jobs import new_job_id
from services.state.keys import job_key
from services.state.store import (
    Claim,
    Fenced,
    IllegalTransition,
    InvalidCursor,
    JobConflict,
    JobNotFound,
    JobStatus,
    StatusReason,
    Store,
)

if TYPE_CHECKING:
    from tests.services.conftest import LossyProxy

pytestmark = pytest.mark.every_server

# The table of the REST reference, written down a second time on purpose.
LEGAL = {
    "queued": {"starting", "cancelled", "failed"},
    "starting": {"running", "queued", "cancelling", "failed"},
    "running": {"queued", "pausing", "cancelling", "succeeded", "failed", "starting"},
    "pausing": {"paused", "cancelling", "failed", "starting"},
    "paused": {"resuming", "cancelling"},
    "resuming": {"running", "starting", "cancelling", "failed"},
    "cancelling": {"cancelled", "failed"},
    "succeeded": set(),
    "failed": set(),
    "cancelled": set(),
}
TERMINAL = {"succeeded", "failed", "cancelled"}


class Spec(BaseModel):
    name: str = "test"
    clip: tuple[float, float] = (3e-4, 4e-4)


async def force(redis_client: Redis, job: str, status: str) -> None:
    await redis_client.hset(job_key(job, "job"), "status", status)


# Creation


async def test_a_new_job_is_queued_with_a_reason(store: Store) -> None:
    job = await store.jobs.create(Spec())
    assert (job.status, job.desired_state, job.attempt, job.step) == ("queued", "running", 0, 0)
    assert job.policy_version is None
    assert job.status_reason is not None
    assert job.status_reason.code == "waiting_for_workers"
    assert job.status_reason.since == job.created_at
    assert job.created_at.endswith("Z")
    assert Spec.model_validate_json(job.spec) == Spec()
    assert job.to_dict()["spec"] == {"name": "test", "clip": [3e-4, 4e-4]}
    assert await store.jobs.get(job.id) == job


async def test_ids_sort_by_time() -> None:
    ids = [new_job_id(time_s) for time_s in (0.0, 1.0, 1.5, 1_795_000_000.0, 4_000_000_000.0)]
    assert ids == sorted(ids)
    assert len({new_job_id(1.0) for _ in range(100)}) == 100
    assert all(identifier.startswith("job_") for identifier in ids)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"'])
async def test_a_specification_is_an_object(store: Store, text: str) -> None:
    with pytest.raises(TypeError, match="JSON object"):
        await store.jobs.create(text)
    assert await store.jobs.page() == []


async def test_a_job_without_id_is_not_found(store: Store) -> None:
    for job in ("job_none", "", "a}b{c", "../x", "x" * 100):
        with pytest.raises(JobNotFound):
            await store.jobs.get(job)
        with pytest.raises(JobNotFound):
            await store.jobs.set_status(job, "starting")
        with pytest.raises(JobNotFound):
            await store.jobs.set_desired_state(job, "cancelled")


async def test_the_same_key_and_body_is_the_same_job(store: Store) -> None:
    first = await store.jobs.create('{"a": 1, "b": 2}', idempotency_key="key")
    again = await store.jobs.create('{"b":2,"a":1}', idempotency_key="key")
    other = await store.jobs.create('{"a": 1, "b": 2}', idempotency_key="other")
    unnamed = await store.jobs.create('{"a": 1, "b": 2}')
    assert again == first
    assert len({first.id, other.id, unnamed.id}) == 3


async def test_the_same_key_with_another_body_is_a_conflict(store: Store) -> None:
    first = await store.jobs.create('{"a": 1}', idempotency_key="key")
    with pytest.raises(JobConflict) as caught:
        await store.jobs.create('{"a": 2}', idempotency_key="key")
    assert caught.value.job == first.id
    assert len(await store.jobs.page()) == 1


async def test_an_id_may_be_chosen_and_is_then_idempotent(store: Store) -> None:
    first = await store.jobs.create('{"a": 1}', job_id="mine")
    assert first.id == "mine"
    assert await store.jobs.create('{"a": 1}', job_id="mine") == first
    with pytest.raises(JobConflict):
        await store.jobs.create('{"a": 2}', job_id="mine")


async def test_many_clients_with_one_key_create_one_job(store: Store, new_client: Callable[[], Redis]) -> None:
    stores = [Store(new_client()) for _ in range(20)]
    jobs = await asyncio.gather(*(each.jobs.create("{}", idempotency_key="key") for each in stores))
    assert len({job.id for job in jobs}) == 1
    assert len(await store.jobs.page()) == 1


@pytest.mark.parametrize("function", [b"gspo_reserve", b"gspo_create", b"gspo_announce"])
async def test_a_lost_reply_creates_no_second_job(
    proxy: LossyProxy, lossy_client: Redis, store: Store, function: bytes
) -> None:
    proxy.disturb(function, lose_reply={0, 1}, lose_request={2})
    job = await Store(lossy_client).jobs.create("{}", idempotency_key="key")
    num_asked = 2 if function == b"gspo_reserve" else 1  # once more when the job is on disk
    assert proxy.num_seen == 3 + num_asked
    assert await store.jobs.page() == [job]
    assert len(await store.events.read(job.id)) == 1


# Lists


async def test_jobs_are_listed_in_pages_in_both_orders(store: Store) -> None:
    times = iter(range(1, 100))
    store.jobs._now = lambda: float(next(times))
    ids = [(await store.jobs.create("{}")).id for _ in range(5)]
    assert [job.id for job in await store.jobs.page()] == ids
    assert [job.id for job in await store.jobs.page(2)] == ids[:2]
    assert [job.id for job in await store.jobs.page(2, ids[1])] == ids[2:4]
    assert [job.id for job in await store.jobs.page(2, before=ids[3])] == ids[:2]
    assert await store.jobs.page(2, ids[4]) == []
    assert [job.id for job in await store.jobs.page(order="desc")] == ids[::-1]
    assert [job.id for job in await store.jobs.page(2, ids[4], order="desc")] == [ids[3], ids[2]]
    assert [job.id for job in await store.jobs.page(9, before=ids[1], order="desc")] == [ids[4], ids[3], ids[2]]


async def test_an_unknown_cursor_is_an_error(store: Store) -> None:
    await store.jobs.create("{}")
    with pytest.raises(InvalidCursor):
        await store.jobs.page(after="job_none")
    with pytest.raises(ValueError, match="asc or desc"):
        await store.jobs.page(order="up")


async def test_workers_serve_the_jobs_that_have_work(store: Store, redis_client: Redis) -> None:
    served = set()
    for status in LEGAL:
        job = await store.jobs.create("{}")
        await force(redis_client, job.id, status)
        if job.id in await store.jobs.served():
            served.add(status)
    assert served == {"starting", "running", "pausing", "resuming"}


# Transitions


@pytest.mark.parametrize("current", LEGAL)
@pytest.mark.parametrize("wanted", LEGAL)
async def test_only_transitions_of_the_table_happen(
    store: Store, redis_client: Redis, current: str, wanted: str
) -> None:
    job = await store.jobs.create("{}")
    await force(redis_client, job.id, current)
    before = len(await store.events.read(job.id))
    if wanted == current or wanted in LEGAL[current]:
        assert (await store.jobs.set_status(job.id, wanted)).status == wanted
        assert len(await store.events.read(job.id)) == before + (wanted != current)
    else:
        with pytest.raises(IllegalTransition) as caught:
            await store.jobs.set_status(job.id, wanted)
        assert (caught.value.current, caught.value.wanted) == (current, wanted)
        assert (await store.jobs.get(job.id)).status == current
        assert len(await store.events.read(job.id)) == before


def test_terminal_states_lead_nowhere() -> None:
    assert {status for status in JobStatus if status.is_terminal} == TERMINAL


async def test_of_two_that_move_a_job_at_once_one_is_refused(store: Store, redis_client: Redis) -> None:
    job = await store.jobs.create("{}")
    await force(redis_client, job.id, "running")
    results = await asyncio.gather(
        *(store.jobs.set_status(job.id, status) for status in ("succeeded", "failed", "pausing")),
        return_exceptions=True,
    )
    assert sum(isinstance(result, IllegalTransition) for result in results) == 2


async def test_a_transition_is_an_event_with_its_cause(store: Store, claim: Claim) -> None:
    reason = StatusReason("non_finite_loss", "the loss of step 3 is not finite")
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    failed = await store.jobs.set_status(claim.job_id, "failed", token=claim.token, reason=reason)
    assert failed.finished_at is not None
    assert failed.started_at is not None
    assert failed.status_reason is not None
    assert (failed.status_reason.code, failed.status_reason.message) == (reason.code, reason.message)
    events = await store.events.read(claim.job_id)
    assert [(event.data["previous"], event.data["status"]) for event in events] == [
        (None, "queued"),
        ("queued", "starting"),
        ("starting", "running"),
        ("running", "failed"),
    ]
    assert {event.type for event in events} == {"job.status"}
    assert events[-1].data["status_reason"]["message"] == reason.message


async def test_a_reason_may_change_without_a_transition(store: Store, claim: Claim) -> None:
    async def reason_after(reason: StatusReason | None) -> StatusReason:
        job = await store.jobs.set_status(claim.job_id, "running", token=claim.token, reason=reason)
        assert job.status_reason is not None
        return job.status_reason

    first = await reason_after(StatusReason("capacity", "4 of 8 engines"))
    assert first.code == "capacity"
    second = await reason_after(StatusReason("capacity", "5 of 8 engines"))
    assert (second.message, second.since) == ("5 of 8 engines", first.since)
    assert await reason_after(None) == second
    events = await store.events.read(claim.job_id)
    await reason_after(StatusReason("capacity", "5 of 8 engines"))
    assert await store.events.read(claim.job_id) == events, "nothing changed, so there is nothing to tell"


async def test_a_text_that_is_no_state_is_refused(store: Store, claim: Claim) -> None:
    with pytest.raises(ValueError, match="asleep"):
        await store.jobs.set_status(claim.job_id, "asleep")


async def test_a_status_set_by_someone_else_fences_the_trainer_of_a_job_that_is_over(
    store: Store, claim: Claim
) -> None:
    await store.jobs.set_status(claim.job_id, "failed")
    with pytest.raises(Fenced):
        await store.jobs.beat(claim.job_id, claim.token)


# What the user wants


async def test_a_queued_job_is_cancelled_at_once(store: Store) -> None:
    job = await store.jobs.create("{}")
    cancelled = await store.jobs.set_desired_state(job.id, "cancelled")
    assert (cancelled.status, cancelled.desired_state) == ("cancelled", "cancelled")
    assert cancelled.finished_at is not None
    assert await store.jobs.set_desired_state(job.id, "cancelled") == cancelled
    assert await store.jobs.claim("t") is None


async def test_a_queued_job_that_is_to_pause_waits_unclaimed(store: Store) -> None:
    job = await store.jobs.create("{}")
    assert (await store.jobs.set_desired_state(job.id, "paused")).status == "queued"
    assert await store.jobs.claim("t") is None
    await store.jobs.set_desired_state(job.id, "running")
    claim = await store.jobs.claim("t")
    assert claim is not None
    assert claim.job_id == job.id


async def test_a_wish_leaves_the_status_of_an_owned_job_to_its_owner(store: Store, claim: Claim) -> None:
    for desired in ("paused", "paused", "running", "cancelled", "cancelled"):
        job = await store.jobs.set_desired_state(claim.job_id, desired)
        assert (job.status, job.desired_state) == ("starting", desired)
    events = [event.data["desired_state"] for event in await store.events.read(claim.job_id)]
    assert events == ["running", "running", "paused", "running", "cancelled"]


async def test_a_cancelled_wish_is_final(store: Store, claim: Claim) -> None:
    await store.jobs.set_desired_state(claim.job_id, "cancelled")
    for desired in ("running", "paused"):
        with pytest.raises(IllegalTransition):
            await store.jobs.set_desired_state(claim.job_id, desired)


@pytest.mark.parametrize("desired", ["running", "paused", "cancelled"])
async def test_a_job_that_is_over_has_no_other_wish(store: Store, redis_client: Redis, desired: str) -> None:
    job = await store.jobs.create("{}")
    await force(redis_client, job.id, "succeeded")
    with pytest.raises(IllegalTransition):
        await store.jobs.set_desired_state(job.id, desired)


async def test_events_and_records_are_plain_json(store: Store, claim: Claim) -> None:
    job = await store.jobs.get(claim.job_id)
    json.dumps([job.to_dict(), *(event.data for event in await store.events.read(job.id))])
