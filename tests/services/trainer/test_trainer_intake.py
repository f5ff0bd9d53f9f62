"""What the trainer takes in, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.codec import encode
from gspo_core.types import Segment, Split
from services.state.queue import Append, Bus, ReadyGroup
from services.state.store import Claim, Store
from services.trainer.groups import batch_selection
from services.trainer.groups.intake import Intake
from tests.services.trainer.groups_kit import Stage
from tests.services.trainer.trainer_kit import DEADLINE_S, episode, stop


class SlowAnswers(Bus):
    """Answers about ready groups are true when they are given, and then held back on their way."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis)
        self.answered = asyncio.Event()
        self.arrive = asyncio.Event()

    async def ready_groups(self, job: str) -> list[ReadyGroup]:
        answer = await super().ready_groups(job)
        self.answered.set()
        await self.arrive.wait()
        return answer


class AfterFailover(Bus):
    """Its streams began with what another server has acknowledged, and this one never had."""

    def __init__(self, redis: Redis, lost: Sequence[Segment]) -> None:
        super().__init__(redis)
        self._lost = [(f"0-{number}", encode(one)) for number, one in enumerate(lost, start=1)]

    async def read_segments(self, job: str, after: str, *args: Any, **options: Any) -> list[tuple[str, bytes]]:
        if after == "0":
            return self._lost
        return await super().read_segments(job, after, *args, **options)


@pytest.fixture
async def bus(redis_client: Redis) -> SlowAnswers:
    bus = SlowAnswers(redis_client)
    await bus.load_functions()
    return bus


async def finish_the_only_episode(bus: Bus, job: str) -> None:
    token = await bus.join("worker")
    (lease,) = await bus.lease(job, "worker", token, 1)
    segments = [replace(segment, key=lease.key) for segment in episode(0, 0, 1.0, [0, 0]).segments]
    await bus.append(job, token, [Append(lease.key, 0, one.index, encode(one), one.is_final) for one in segments])


async def test_the_last_segment_may_arrive_while_the_answer_about_ready_groups_is_on_its_way(
    bus: SlowAnswers, claim: Claim
) -> None:
    job = claim.job_id
    await bus.dispatch(job, claim.token, 0, size=1, split=Split.TRAIN, task_index=0)
    intake = Intake(bus, job)
    waiting = asyncio.create_task(intake.wait_for(Split.TRAIN, 1))
    await bus.answered.wait()  # "none is ready"
    reading = asyncio.create_task(intake.run())
    await finish_the_only_episode(bus, job)
    async with asyncio.timeout(DEADLINE_S):
        while not intake.num_segments:
            await asyncio.sleep(0.01)
        bus.arrive.set()
        (group,) = await waiting
    assert list(group.rewards) == [1.0]
    await stop(reading)


async def test_a_group_whose_last_open_episode_is_given_up_is_handed_out_without_it(
    redis_client: Redis, claim: Claim
) -> None:
    job, bus = claim.job_id, Bus(redis_client)
    await bus.dispatch(job, claim.token, 0, size=2, split=Split.TRAIN, task_index=0)
    intake = Intake(bus, job)
    reading = asyncio.create_task(intake.run())
    await finish_the_only_episode(bus, job)
    waiting = asyncio.create_task(intake.wait_for(Split.TRAIN, 1))
    async with asyncio.timeout(DEADLINE_S):
        while not intake.num_segments:
            await asyncio.sleep(0.01)
        token = await bus.join("unlucky")
        for _ in range(3):
            (lease,) = await bus.lease(job, "unlucky", token, 1)
            await bus.fail(lease.key, token, "it cannot be played")
        (group,) = await waiting
    assert [trajectory.key.member for trajectory in group] == [0]
    assert group.size == 2
    await stop(reading)


async def test_a_group_with_a_segment_of_another_release_is_named_instead_of_waited_for(
    bus: SlowAnswers, claim: Claim
) -> None:
    bus.arrive.set()
    job = claim.job_id
    for number in (0, 1):
        await bus.dispatch(job, claim.token, number, size=1, split=Split.TRAIN, task_index=0, bytes_per_episode=1000)
    token = await bus.join("worker")
    for lease in await bus.lease(job, "worker", token, 2):
        played = [replace(one, key=lease.key) for one in episode(0, 0, 1.0, [0, 0]).segments]
        payloads = [encode(one) for one in played]
        if lease.key.group == 0:  # the schema stands behind the magic bytes
            payloads = [payload[:4] + (99).to_bytes(4, "little") + payload[8:] for payload in payloads]
        appends = [
            Append(lease.key, 0, one.index, payload, one.is_final, 0)
            for one, payload in zip(played, payloads, strict=True)
        ]
        await bus.append(job, token, appends)
    intake = Intake(bus, job)
    reading = asyncio.create_task(intake.run())
    try:
        assert [one.group for one in await intake.wait_for(Split.TRAIN, 1)] == [1]
        assert await intake.unreadable(among={0, 1}) == [0]
    finally:
        await stop(reading)
    assert intake.rejected == {"UnknownSchema": 2}
    assert "schema 99" in intake.refusals["UnknownSchema"]


def played_otherwise(segments: Sequence[Segment]) -> list[Segment]:
    return [replace(one, token_ids=one.token_ids + 1) for one in segments if not one.is_final]


async def test_an_episode_that_contradicts_what_was_read_before_a_failover_is_not_joined_to_it(
    redis_client: Redis, claim: Claim
) -> None:
    """Its group is named once it is ready, so that another one is started; a later attempt makes it whole."""
    job = claim.job_id
    segments = [one for number in (0, 1) for one in episode(number, 0, 1.0, [0, 0, 0]).segments]
    segments = [replace(one, key=replace(one.key, job=job)) for one in segments]
    begun, again = [one for one in segments if not one.is_final], [replace(one, attempt=1) for one in segments[3:]]
    bus = AfterFailover(redis_client, played_otherwise(segments))
    for number in (0, 1):
        await bus.dispatch(job, claim.token, number, size=1, split=Split.TRAIN, task_index=0)
    token = await bus.join("worker")
    await bus.lease(job, "worker", token, 2)
    for one in begun:
        await bus.append(job, token, [Append(one.key, 0, one.index, encode(one), one.is_final)])
    intake = Intake(bus, job)
    reading = asyncio.create_task(intake.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while intake.rejected.total() < len(begun):
                await intake.progress(intake.num_segments)
        await stop(reading)
        await bus.restart(again[0].key, token, 1)
        for one in (segments[2], *again):
            await bus.append(job, token, [Append(one.key, one.attempt, one.index, encode(one), one.is_final)])
        assert await intake.unreadable(among={0, 1}) == [0], "the other one was begun again, which is still to be read"
        reading = asyncio.create_task(intake.run())
        (group,) = await asyncio.wait_for(intake.wait_for(Split.TRAIN, 1), DEADLINE_S)
        assert [one.segments for one in group] == [tuple(again)]
        assert await intake.unreadable(among={0, 1}) == [0]
        assert (intake.is_broken(0), intake.is_broken(1)) == (True, False)
    finally:
        await stop(reading)
    assert set(intake.rejected) == {"ConflictingSegment"}


async def test_a_job_goes_on_without_the_groups_that_a_failover_broke(
    redis_client: Redis, store: Store, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say nothing of later groups, so they never end a job, however many there are."""
    monkeypatch.setattr(batch_selection, "MAX_BATCHES_DROPPED_IN_A_ROW", 1)
    segments = [replace(one, key=replace(one.key, job=claim.job_id)) for one in episode(0, 0, 1.0, [0, 0]).segments]
    bus = AfterFailover(redis_client, played_otherwise(segments))
    stage = Stage(claim, store, bus, tmp_path, {})
    await stage.begin()
    reading = asyncio.create_task(stage.intake.run())
    try:
        for number in (0, 1):
            for member in range(3):
                await stage.play(number, member, float(member), 2)
        assert [group.group for group in await stage.take()] == [1]
    finally:
        await stop(reading)
    counters = await bus.counters(claim.job_id)
    assert (counters["dropped_unreadable"], counters["trained"], counters["dispatched"]) == (1, 1, 3)
    alerts = [event.data for event in await store.events.read(claim.job_id) if event.type == "alert"]
    assert [alert["kind"] for alert in alerts] == ["segment_refused"]
