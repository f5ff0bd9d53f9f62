"""What a job does whose Redis lost its last writes, as after a failover to a replica that was behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gspo_core.codec import encode
from gspo_core.types import EpisodeKey
from services.state.keys import BUS_KEYS, job_key
from services.state.queue import Append, Bus
from services.state.store import Claim, Store
from services.trainer.groups import batch_selection
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
async def stage(claim: Claim, store: Store, bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(claim, store, bus, tmp_path, {})
    reading = asyncio.create_task(stage.intake.run())
    yield stage
    await stop(reading)


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
