"""What a trainer makes of what workers say of the environments, on a real server."""

from __future__ import annotations

import asyncio

import pytest

from gspo_core.spec import JobSpec
from gspo_core.types import Split
from services.state.store import Claim, Store
from services.trainer.telling.environments import DescribedEnvironments
from services.trainer.telling.failure import JobFailure
from services.trainer.telling.status import JobStatusBoard
from tests.patience import HANG_S

SPEC = JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}]})
DEADLINE_S = HANG_S
PATIENCE_S = 30.0


class Stage:
    """A claimed job, and a clock that stands still until it is set."""

    def __init__(self, store: Store, claim: Claim) -> None:
        self.store, self.claim, self.now = store, claim, 0.0
        self.environments = DescribedEnvironments(
            store, claim.job_id, JobStatusBoard(store, claim), patience_s=PATIENCE_S, clock=lambda: self.now
        )

    async def complain(self, error: str) -> None:
        await self.store.events.add(
            self.claim.job_id, "env.health", {"worker": "rollout-0", "healthy": False, "error": error}
        )

    async def describe(self) -> None:
        await self.store.environments.describe(self.claim.job_id, 0, {"num_tasks": {"train": 7, "eval": 2}})

    async def reason_becomes(self, code: str) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                reason = (await self.store.jobs.get(self.claim.job_id)).status_reason
                if reason is not None and reason.code == code:
                    return reason.message
                await asyncio.sleep(0.01)


@pytest.fixture
async def stage(store: Store) -> Stage:
    await store.jobs.create(SPEC)
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    return Stage(store, claim)


async def test_a_complaint_becomes_the_jobs_reason_and_a_later_description_still_counts(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.environments.num_tasks(1))
    await stage.reason_becomes("waiting_for_workers")
    await stage.complain("there is no module 'nope'")
    assert await stage.reason_becomes("env_unhealthy") == "rollout-0: there is no module 'nope'"
    stage.now = PATIENCE_S - 1
    await stage.describe()
    assert await waiting == {Split.TRAIN: [7], Split.EVAL: [2]}


async def test_an_environment_that_nobody_can_load_ends_the_job_with_the_cause(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.environments.num_tasks(1))
    await stage.complain("there is no module 'nope'")
    await stage.reason_becomes("env_unhealthy")
    stage.now = PATIENCE_S
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(JobFailure, match="no module 'nope'") as caught:
            await waiting
    assert caught.value.code == "env_unhealthy"


async def test_without_a_complaint_a_job_waits_for_workers_as_long_as_it_takes(stage: Stage) -> None:
    waiting = asyncio.create_task(stage.environments.num_tasks(1))
    await stage.reason_becomes("waiting_for_workers")
    stage.now = 1000 * PATIENCE_S
    await stage.describe()
    assert (await waiting)[Split.TRAIN] == [7]
