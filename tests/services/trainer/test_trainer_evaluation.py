"""Rounds of held-out episodes, on a real queue: measured beside the training, never trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gspo_core.codec import encode
from gspo_core.spec import JobSpec
from gspo_core.types import Split
from services.state.queue import Append, Bus, LeasedEpisode
from services.state.store import Claim, Store
from services.trainer.groups.evaluation import Evaluator, held_out_metrics
from services.trainer.groups.intake import Intake
from tests.patience import HANG_S
from tests.services.trainer.trainer_kit import episode, group, stop

SPEC = JobSpec.model_validate(
    {
        "model": "m",
        "environments": [{"ref": "a:B"}],
        "evaluation": {"tasks": 1, "every": 5, "episodes_per_task": 2},
        "steps": 10,
    }
)


async def test_a_round_with_episodes_of_another_release_ends_and_says_so(bus: Bus, store: Store, claim: Claim) -> None:
    """They never become complete; the job would wait for them for ever."""
    job, reported = claim.job_id, list[Mapping[str, float]]()

    async def report(_: int, metrics: Mapping[str, float]) -> None:
        reported.append(metrics)

    spec = SPEC.model_copy(update={"evaluation": SPEC.evaluation.model_copy(update={"tasks": 2})})  # type: ignore[union-attr]
    intake = Intake(bus, job)
    reading = asyncio.create_task(intake.run())
    playing = asyncio.create_task(Evaluator(claim, spec, bus, store, intake, [4], report).play(5, version=3))
    token, leases = await bus.join("w"), list[LeasedEpisode]()
    try:
        async with asyncio.timeout(HANG_S):
            while len(leases) < 4:
                leases += await bus.lease(job, "w", token, 4)
            foreign = min(lease.key.group for lease in leases)
            for lease in leases:
                segments = [replace(one, key=lease.key) for one in episode(0, 0, 1.0, (3,)).segments]
                payloads = [encode(one) for one in segments]
                if lease.key.group == foreign:  # the schema stands behind the magic bytes
                    payloads = [payload[:4] + (99).to_bytes(4, "little") + payload[8:] for payload in payloads]
                appends = [
                    Append(lease.key, 0, one.index, payload, one.is_final, one.version)
                    for one, payload in zip(segments, payloads, strict=True)
                ]
                await bus.append(job, token, appends)
            await playing
    finally:
        await stop(reading)
    assert [metrics["episodes/count"] for metrics in reported] == [2]
    [alert] = [event.data for event in await store.events.read(job) if event.type == "alert"]
    assert (alert["kind"], alert["step"]) == ("segment_refused", 5)
    assert "schema 99" in alert["message"]
    counters = await bus.counters(job)
    assert (counters["evaluated"], counters["dropped_unreadable"], counters["in_flight"]) == (1, 1, 0)


async def test_a_round_is_a_series_of_its_own_and_names_the_versions_that_played_it(
    bus: Bus, store: Store, claim: Claim
) -> None:
    """It was begun at version 3; new weights came while its second episode was played."""
    job, reported = claim.job_id, list[tuple[int, Mapping[str, float]]]()

    async def report(step: int, metrics: Mapping[str, float]) -> None:
        reported.append((step, metrics))

    intake = Intake(bus, job)
    reading = asyncio.create_task(intake.run())
    playing = asyncio.create_task(Evaluator(claim, SPEC, bus, store, intake, [4], report).play(5, version=3))
    token, leases = await bus.join("w"), list[LeasedEpisode]()
    async with asyncio.timeout(HANG_S):
        while len(leases) < 2:
            leases += await bus.lease(job, "w", token, 2)
        assert {lease.split for lease in leases} == {Split.EVAL}
        for lease, reward, versions in zip(leases, (1.0, 0.0), ((3, 3), (3, 5)), strict=True):
            played = episode(lease.key.group, lease.key.member, reward, versions)
            segments = [replace(one, key=lease.key) for one in played.segments]
            appends = [Append(lease.key, 0, one.index, encode(one), one.is_final, one.version) for one in segments]
            await bus.append(job, token, appends)
        await playing
    await stop(reading)
    [(step, metrics)] = reported
    assert (step, metrics["reward/mean"], metrics["episodes/failed"]) == (5, 0.5, 0)
    [event] = [event for event in await store.events.read(job, "0", block_ms=0) if event.type == "evaluation"]
    assert (event.data["version"], event.data["version_min"], event.data["version_max"]) == (3, 3, 5)
    counters = await bus.counters(job)
    assert (counters["evaluated"], counters.get("trained", 0), counters["in_flight"]) == (1, 0, 0)


def test_held_out_rewards_have_the_interval_that_gspo_eval_gives_them() -> None:
    groups = [group(number, (float(number < 8),)) for number in range(10)]
    found = held_out_metrics([*groups, group(10, (None,))])
    assert (found["reward/mean"], found["episodes/failed"]) == (0.8, 1)
    assert (found["reward/low"], found["reward/high"]) == pytest.approx((0.490162, 0.943318), abs=1e-6)


def test_where_no_held_out_episode_has_a_reward_there_is_none() -> None:
    assert held_out_metrics([group(0, (None, None))]) == {"episodes/failed": 2.0}
