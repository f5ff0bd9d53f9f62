"""Groups that were too old when they were complete: told, replaced once an engine has followed, never a job's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.state.queue import Bus
from services.state.store import Claim, Store
from services.trainer.groups.batch_selection import MAX_BATCHES_DROPPED_IN_A_ROW
from tests.services.rollout.rollout_kit import until
from tests.services.trainer.groups_kit import Stage
from tests.services.trainer.trainer_kit import stop

LAG = "http://slow holds version 0; the newest is 2"


class Engines:
    text = ""

    def lag(self) -> str:
        return self.text


@pytest.fixture
async def stage(claim: Claim, store: Store, bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(claim, store, bus, tmp_path, {"on_stale": "drop", "staleness_cap": 1}, engines=Engines())
    await stage.begin()
    reading = asyncio.create_task(stage.intake.run())
    yield stage
    await stop(reading)


async def reason(stage: Stage) -> str:
    job = await stage.store.jobs.get(stage.claim.job_id)
    return job.status_reason.message


async def alerts(stage: Stage) -> list[str]:
    events = await stage.store.events.read(stage.claim.job_id)
    return [event.data["kind"] for event in events if event.type == "alert"]


async def play(stage: Stage, group: int, version: int) -> None:
    for member in range(3):
        await stage.play(group, member, float(member), 1, version=version)


@pytest.mark.parametrize("cause", ["dropped_stale", "dropped_late"])
async def test_age_alone_never_ends_a_job_and_a_long_row_of_it_is_told_once(stage: Stage, cause: str) -> None:
    for group in range(3 * MAX_BATCHES_DROPPED_IN_A_ROW):
        await stage.run._batches.drop(group, cause)
    assert await alerts(stage) == ["stale_backlog"]


async def test_replacements_wait_while_no_engine_has_followed_and_the_job_says_which(stage: Stage) -> None:
    stage.run._staleness.add(1, 1)
    stage.run._staleness.add(2, 2)
    stage.run._lineage.step = 2
    stage.run._context.services.engines.text = LAG
    await play(stage, 0, version=0)
    taking = asyncio.create_task(stage.take())

    async def told() -> bool:
        return LAG in await reason(stage)

    await until(told)
    assert "what they sample is older than staleness_cap (groups dropped in a row: 1)" in await reason(stage)
    assert [one.group for one in await stage.bus.groups(stage.claim.job_id)] == [1]  # no replacement yet

    stage.run._context.services.engines.text = ""

    async def replaced() -> bool:
        return len(await stage.bus.groups(stage.claim.job_id)) > 1

    await until(replaced)
    assert LAG not in await reason(stage)
    await play(stage, 1, version=2)
    (group,) = await taking
    assert group.group == 1
