"""Trainers are killed, stopped and robbed of their Redis between any two writes: every group is trained once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.position import Position
from gspo_core.types import Group
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir, JobsDir
from services.state.queue import Bus, Fenced
from services.state.store import Claim, Store
from tests.services.state.small_trainer import POINTS, Killed, SmallTrainer, World, judge

pytestmark = pytest.mark.every_server

LEASE_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fate:
    """Decides at every point what befalls the trainer that visits it."""

    def __init__(self, redis: Redis, world: World, clock: Clock, seed: int, *, wipes: bool = False) -> None:
        self._redis, self._world, self._clock = redis, world, clock
        self._random, self._wipes = random.Random(seed), wipes
        self.counts: Counter[str] = Counter()
        self.make = SmallTrainer
        self._depth = 0

    async def visit(self, point: str) -> None:
        drawn = self._random.random()
        if drawn < 0.08:
            self.counts["killed"] += 1
            raise Killed(point)
        if drawn < 0.14 and self._depth == 0:
            self.counts["stopped"] += 1
            await self._let_another_take_over(self._random.randint(1, 4))
        elif drawn < 0.18 and self._wipes:
            self.counts["wiped"] += 1
            await self._redis.flushall()

    async def run_to_the_end(self) -> None:
        for _ in range(200):
            try:
                await self.make(self._world, await self.claim(), self.visit).run()
            except (Killed, Fenced):
                continue
            return
        raise AssertionError(f"200 trainers did not finish: {self.counts}")

    async def _let_another_take_over(self, num_steps: int) -> None:
        """The visitor is stopped for longer than its lease; when this returns it goes on, and knows of nothing."""
        self._depth += 1
        try:
            await self.make(self._world, await self.claim(), self.visit).run(num_steps)
        except (Killed, Fenced):
            pass
        finally:
            self._depth -= 1

    async def claim(self) -> Claim:
        while (claim := await self._world.store.jobs.claim("trainer")) is None:
            self._clock.now += LEASE_S / 5
        return claim


async def world_of(redis_client: Redis, tmp_path: Path, num_steps: int) -> tuple[World, Clock]:
    clock = Clock()
    store = Store(redis_client, lease_s=LEASE_S, clock=clock, max_attempts=10_000, jobs_dir=JobsDir(tmp_path))
    bus = Bus(redis_client, clock=clock)
    await bus.load_functions()
    job = (await store.jobs.create("{}")).id
    return World(store, bus, job, tmp_path / job, num_steps, Counter()), clock


def seeds(normal: int, slow: int) -> list[Any]:
    return [*range(normal), *(pytest.param(seed, marks=[pytest.mark.slow]) for seed in range(normal, slow))]


@pytest.mark.parametrize("seed", seeds(2, 40))
async def test_every_group_is_trained_once_and_played_once(redis_client: Redis, tmp_path: Path, seed: int) -> None:
    world, clock = await world_of(redis_client, tmp_path, 12)
    fate = Fate(redis_client, world, clock, seed)
    await fate.run_to_the_end()
    await judge(world)
    assert set(world.plays.values()) == {1}, "what was acknowledged was sampled again"
    assert fate.counts["killed"] + fate.counts["stopped"] > 1


@pytest.mark.parametrize("seed", seeds(1, 40))
async def test_every_group_is_trained_once_although_redis_is_wiped_again_and_again(
    redis_client: Redis, tmp_path: Path, seed: int
) -> None:
    world, clock = await world_of(redis_client, tmp_path, 20)
    fate = Fate(redis_client, world, clock, seed, wipes=True)
    await fate.run_to_the_end()
    await judge(world)
    assert fate.counts["wiped"]


# The oracle bites


class CommitsFirst(SmallTrainer):
    async def secure(self, chosen: list[Group]) -> None:
        await self.commit(chosen)
        await self._visit("committed")
        self.log(chosen)
        await self._visit("logged")


class ReplaysTheDead(SmallTrainer):
    """The highest step wins, and of two logs of a step the first: no record of forks is looked at."""

    def logs_to_replay(self, parent: Position) -> list[Position]:
        found: dict[int, Position] = {}
        for epoch, step in self._log.steps():
            if step > parent.step:
                found.setdefault(step, Position(epoch, step))
        return [found[step] for step in sorted(found)]


async def test_a_commit_before_the_batch_log_is_noticed(redis_client: Redis, tmp_path: Path) -> None:
    world, clock = await world_of(redis_client, tmp_path, 6)
    killed: list[str] = []

    async def kill_once_after_the_commit(point: str) -> None:
        if point == "committed" and not killed:
            killed.append(point)
            raise Killed(point)

    await run_with(redis_client, world, clock, CommitsFirst, kill_once_after_the_commit)
    assert killed
    with pytest.raises(AssertionError):
        assert set(world.plays.values()) == {1}


async def log_after_the_end_of_its_epoch(redis_client: Redis, tmp_path: Path, make: type[SmallTrainer]) -> World:
    """Stopped just before it writes the log of step 4, a trainer writes it when it wakes up. Another one has trained
    steps 4 and 5 meanwhile, with other groups, and no checkpoint was due."""
    world, clock = await world_of(redis_client, tmp_path, 8)
    fate = Fate(redis_client, world, clock, 0)
    num_chosen = 0

    async def visit(point: str) -> None:
        nonlocal num_chosen
        num_chosen += point == "chosen"
        if point == "chosen" and num_chosen == 4:
            other = make(world, await fate.claim(), no_fault)
            other.prefers_newest = True
            await other.run(2)

    with pytest.raises(Fenced):
        await make(world, await fate.claim(), visit).run()
    assert {(1, 4), (2, 4), (2, 5)} <= set(BatchLog(JobDir(world.job_dir)).steps())
    await make(world, await fate.claim(), no_fault).run()
    return world


async def test_a_log_after_the_end_of_its_epoch_is_void(redis_client: Redis, tmp_path: Path) -> None:
    world = await log_after_the_end_of_its_epoch(redis_client, tmp_path, SmallTrainer)
    await judge(world)
    assert set(world.plays.values()) == {1}


async def test_a_dead_epochs_log_that_is_replayed_is_noticed(redis_client: Redis, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        await judge(await log_after_the_end_of_its_epoch(redis_client, tmp_path, ReplaysTheDead))


async def no_fault(point: str) -> None:
    assert point in POINTS


async def run_with(
    redis: Redis, world: World, clock: Clock, make: type[SmallTrainer], visit: Callable[..., object]
) -> None:
    fate = Fate(redis, world, clock, 0)
    fate.make = make
    fate.visit = visit  # type: ignore[method-assign, assignment]
    await fate.run_to_the_end()
