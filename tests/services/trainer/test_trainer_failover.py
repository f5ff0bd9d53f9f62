"""What a job does whose Redis lost its last writes, as after a failover to a replica that was behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.codec import encode
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey
from services.state.keys import BUS_KEYS, job_key
from services.state.queue import Append, Bus
from services.state.store import Claim, Store
from services.trainer.groups import admission, batch_selection
from services.trainer.groups.evaluation import Evaluator
from tests.services.trainer.groups_kit import Stage
from tests.services.trainer.trainer_kit import DEADLINE_S, episode, stop


@dataclass
class Replica:
    """Has the queue of a job as it was when it was last copied."""

    redis: Redis
    job: str

    async def copy(self) -> None:
        self._values = {name: await self.redis.dump(job_key(self.job, name)) for name in BUS_KEYS}

    async def take_over(self) -> None:
        for name, value in self._values.items():
            await self.redis.delete(job_key(self.job, name))
            if value is not None:
                await self.redis.restore(job_key(self.job, name), 0, value)


@pytest.fixture
def replica(redis_client: Redis, claim: Claim) -> Replica:
    return Replica(redis_client, claim.job_id)


@pytest.fixture
async def stage(
    claim: Claim, store: Store, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    monkeypatch.setattr(admission, "LOOK_FOR_LOST_S", 0.1)
    stage = Stage(claim, store, bus, tmp_path, {})
    reading = asyncio.create_task(stage.intake.run())
    yield stage
    await stop(reading)


async def opened(bus: Bus, job: str, num_groups: int) -> list[int]:
    """The groups in the queue, once there are so many."""
    async with asyncio.timeout(DEADLINE_S):
        while len(found := await bus.open_groups(job)) < num_groups:
            await asyncio.sleep(0.02)
    return found


async def test_groups_whose_start_was_lost_are_started_again(stage: Stage, replica: Replica) -> None:
    job = stage.claim.job_id
    await replica.copy()
    await stage.begin()
    await replica.take_over()
    assert await stage.bus.open_groups(job) == []
    taking = asyncio.create_task(stage.take())
    assert await opened(stage.bus, job, 2) == [0, 1]
    await stage.bus.lease(job, "worker", stage.token, 6)
    for member in range(3):
        await stage.play(0, member, float(member), 2)
    assert [group.group for group in await taking] == [0]
    counters = await stage.bus.counters(job)
    assert (counters["dispatched"], counters["trained"]) == (2, 1)


async def test_groups_that_are_there_are_left_as_they_are(stage: Stage, replica: Replica) -> None:
    """The first was played half when the start of the second was lost."""
    job = stage.claim.job_id
    await stage.begin()
    await stage.play(0, 0, 0.0, 2)
    await replica.copy()
    await stage.bus.commit(job, stage.claim.token, 0, [1])  # as good as never started
    started = dict(stage.run._admission.dispatched_steps)
    taking = asyncio.create_task(stage.take())
    assert await opened(stage.bus, job, 2) == [0, 1]
    for member in (1, 2):
        await stage.play(0, member, float(member), 2)
    assert [group.group for group in await taking] == [0]
    assert stage.run._admission.dispatched_steps == {1: started[1]}
    assert stage.intake.rejected == {}


async def test_a_group_with_an_attempt_that_was_undone_is_replaced(
    stage: Stage, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt before it goes on, which the trainer has given up: what it reads of the two is no episode."""
    monkeypatch.setattr(batch_selection, "MAX_BATCHES_DROPPED_IN_A_ROW", 1)  # that says nothing of later groups
    job, key = stage.claim.job_id, EpisodeKey(stage.claim.job_id, 0, 0)
    first, last = (replace(one, key=key) for one in episode(0, 0, 1.0, [0, 0]).segments)
    await stage.begin()
    for group, member in ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        await stage.play(group, member, float(member), 2)
    await stage.bus.append(job, stage.token, [Append(key, 0, 0, encode(first), False, 0)])
    await replica.copy()
    await stage.bus.restart(key, stage.token, 1)
    await stage.bus.append(job, stage.token, [Append(key, 1, 0, encode(replace(first, attempt=1)), False, 0)])
    async with asyncio.timeout(DEADLINE_S):
        while stage.intake.num_segments < 5 * 2 + 2:
            await stage.intake.progress(stage.intake.num_segments)
    await replica.take_over()
    await stage.bus.append(job, stage.token, [Append(key, 0, 1, encode(last), True, 0)])
    assert [group.group for group in await stage.take()] == [1]
    counters = await stage.bus.counters(job)
    assert (counters["dropped_unreadable"], counters["trained"], counters["dispatched"]) == (1, 1, 3)
    [alert] = [event.data for event in await stage.store.events.read(job) if event.type == "alert"]
    assert alert["kind"] == "segment_refused"
    assert "attempt 0: it goes on although attempt 1 had begun" in alert["message"]


async def test_a_held_out_group_whose_start_was_lost_is_started_again(stage: Stage, replica: Replica) -> None:
    job, reported = stage.claim.job_id, list[Mapping[str, float]]()
    spec = JobSpec.model_validate(
        {
            "model": "m",
            "environments": [{"ref": "a:B"}],
            "evaluation": {"tasks": 2, "every": 5, "episodes_per_task": 1},
        }
    )

    async def report(_: int, metrics: Mapping[str, float]) -> None:
        reported.append(metrics)

    evaluator = Evaluator(stage.claim, spec, stage.bus, stage.store, stage.intake, [4], report)
    await replica.copy()
    playing = asyncio.create_task(evaluator.play(5, version=3))
    await opened(stage.bus, job, 2)
    await replica.take_over()
    token = await stage.bus.join("worker")
    await opened(stage.bus, job, 2)
    leases = await stage.bus.lease(job, "worker", token, 2)
    assert sorted(lease.task_index for lease in leases) == [0, 1]
    stage.token = token
    for lease in leases:
        await stage.play(lease.key.group, 0, 1.0, 1)
    async with asyncio.timeout(DEADLINE_S):
        await playing
    assert [metrics["reward/mean"] for metrics in reported] == [1.0]
