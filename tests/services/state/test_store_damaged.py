"""A job's record that cannot be read, spoiled or of a later release, concerns that job alone: all others go on."""

from __future__ import annotations

import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from services.state.jobs import DamagedJob
from services.state.keys import job_key
from services.state.refusals import Damaged
from services.state.store import Store

NOT_TEXT = b"\xc1"


class Spec(BaseModel):
    name: str = "test"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, NOT_TEXT) for field in ("spec", "status", "desired_state", "created_at", "owner", "settings")),
        *((field, b"many") for field in ("attempt", "epoch", "step", "revision", "settings", "attempts")),
        ("status", b"hibernating"),
        ("desired_state", b"later"),
        ("attempts", b'[{"of": "a later release"}]'),
        ("unheard_of", NOT_TEXT),
    ],
)
async def test_one_job_that_cannot_be_read_hides_no_other(
    store: Store, redis_client: Redis, field: str, value: bytes
) -> None:
    spoiled, fine = [(await store.jobs.create(Spec(name=name))).id for name in ("a", "b")]
    await redis_client.hset(job_key(spoiled, "job"), field, value)
    assert [job.id for job in await store.jobs.page()] == [fine]
    assert [job.id for job in await store.jobs.queued()] == [fine]
    with pytest.raises(DamagedJob, match=f"the record of job {spoiled} in Redis cannot be read"):
        await store.jobs.get(spoiled)
    claim = await store.jobs.claim("trainer-1", lost_first=True)
    assert claim is not None
    assert claim.job_id == fine
    await store.jobs.set_status(fine, "running", token=claim.token)
    assert await store.jobs.served() == [fine]
    assert await store.jobs.claim("trainer-2") is None
    await store.jobs.give_up_lost(fine)


async def test_an_environment_that_cannot_be_read_is_said(store: Store, redis_client: Redis) -> None:
    job = (await store.jobs.create(Spec())).id
    await redis_client.hset(job_key(job, "environments"), "0", NOT_TEXT)
    with pytest.raises(Damaged, match="the description of environment 0"):
        await store.environments.get(job, 0)


async def test_a_step_that_is_none_hides_no_metrics(store: Store, redis_client: Redis) -> None:
    job = (await store.jobs.create(Spec())).id
    for step in (1, 2, 3):
        await store.metrics.add(job, step, {"loss": float(step)})
    await redis_client.zadd(job_key(job, "metric_steps"), {"gar:bage": 1})
    assert [row["step"] for row in await store.metrics.read(job)] == [1, 2, 3]
