"""Rounds of held-out episodes, on a real queue: measured beside the training, never trained."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from gspo_core.codec import encode
from gspo_core.spec import JobSpec
from gspo_core.types import Split
from services.bus import Append, Bus, EpisodeLease
from services.store import Claim, Store
from services.trainer.evaluation import Evaluator
from services.trainer.intake import Intake
from tests.services.trainer_kit import episode, stop

SPEC = JobSpec.model_validate(
    {
        "model": "m",
        "environments": [{"ref": "a:B"}],
        "evaluation": {"tasks": 1, "every": 5, "episodes_per_task": 2},
        "steps": 10,
    }
)


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
    token, leases = await bus.join("w"), list[EpisodeLease]()
    async with asyncio.timeout(60):
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
    assert (step, metrics["reward/mean"]) == (5, 0.5)
    [event] = [event for event in await store.read_events(job, "0", block_ms=0) if event.type == "evaluation"]
    assert (event.data["version"], event.data["version_min"], event.data["version_max"]) == (3, 3, 5)
    counters = await bus.counters(job)
    assert (counters["evaluated"], counters.get("trained", 0), counters["in_flight"]) == (1, 0, 0)
