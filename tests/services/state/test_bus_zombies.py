"""A process is stopped for longer than its lease and wakes up: it can change nothing any more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.types import Split
from services.state.fleet_records import EngineRecord
from services.state.queue import Append, Bus
from services.state.server import RedisServer
from services.state.store import Claim, Store
from tests.patience import HANG_S

pytestmark = pytest.mark.every_server

LEASE_S = 1.0


class Zombie:
    def __init__(self, process: asyncio.subprocess.Process, holds: Any) -> None:
        self.process, self.holds = process, holds

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    async def wake(self) -> dict[str, str]:
        """What became of each of its late writes."""
        os.kill(self.process.pid, signal.SIGCONT)
        return dict(await self.said())

    async def said(self) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(HANG_S):
            return json.loads(await self.process.stdout.readline())


@asynccontextmanager
async def zombie(kind: str, url: str, job: str) -> AsyncIterator[Zombie]:
    argv = [sys.executable, "-m", "tests.services.state.zombie", kind, url, job, str(LEASE_S)]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        made = Zombie(process, None)
        made.holds = await made.said()
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_the_late_writes_of_a_worker_that_was_stopped_are_fenced(
    redis_server: RedisServer, redis_client: Redis, bus: Bus, claim: Claim
) -> None:
    job, reaper = claim.job_id, Bus(redis_client, lease_s=LEASE_S)
    for group in range(2):
        await bus.dispatch(job, claim.token, group, size=1, split=Split.TRAIN, task_index=0)
    async with zombie("worker", redis_server.url, job) as sleeper:
        sleeper.stop()
        async with asyncio.timeout(HANG_S):
            while not await reaper.reap(job):
                await asyncio.sleep(LEASE_S / 20)
        token = await bus.join("heir")
        first, second = await bus.lease(job, "heir", token, 2)
        assert [str(first.key), str(second.key)] == sleeper.holds
        assert first.num_segments == 1
        await bus.append(job, token, [Append(first.key, 0, 1, b"of the heir", False)])
        before = await bus.groups(job), await bus.counters(job), await bus.read_segments(job, block_ms=0)
        told = await sleeper.wake()
        assert (await bus.groups(job), await bus.counters(job), await bus.read_segments(job, block_ms=0)) == before
    passed_over = {name: told.pop(name) for name in ("hand back", "fail")}
    assert set(passed_over.values()) == {"answered None"}
    assert told.pop("lease") == "answered []"
    assert set(told.values()) == {"fenced"}, told
    await bus.append(job, token, [Append(first.key, 0, 2, b"end", True), Append(second.key, 0, 0, b"end", True)])
    assert len(await bus.ready_groups(job)) == 2


async def test_the_late_writes_of_a_trainer_that_was_stopped_are_fenced(
    redis_server: RedisServer, redis_client: Redis, bus: Bus, store: Store
) -> None:
    job = (await store.jobs.create("{}")).id
    await store.fleet.register_engine(EngineRecord(id="engine"))
    heirs = Store(redis_client, lease_s=LEASE_S)
    async with zombie("trainer", redis_server.url, job) as sleeper:
        sleeper.stop()
        heir: Claim | None = None
        async with asyncio.timeout(HANG_S):
            while heir is None:
                heir = await heirs.jobs.claim("heir")
                await asyncio.sleep(LEASE_S / 20)
        assert heir.epoch == sleeper.holds["epoch"] + 1
        before = await state(bus, store, job)
        told = await sleeper.wake()
        assert await state(bus, store, job) == before
    assert set(told.values()) == {"fenced"}, told
    assert len(told) == 11
    await store.jobs.set_status(job, "running", token=heir.token)


async def state(bus: Bus, store: Store, job: str) -> list[object]:
    return [
        await bus.groups(job),
        await bus.counters(job),
        await store.jobs.get(job),
        await store.events.read(job),
        await store.metrics.read(job),
        await store.versions.all(job),
        await store.fleet.engines(),
    ]
