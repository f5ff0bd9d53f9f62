"""What a job says while it waits for a batch, and when it says nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from gspo_core.types import TimeSplit
from services.files.job_dir import JobsDir
from services.state.jobs import StatusReason
from services.state.refusals import Fenced
from services.state.store import Claim, Store
from services.trainer.groups.step_progress import QUIET_S, RETELL_S, StepProgress
from services.trainer.telling.status import JobStatusBoard
from tests.services.trainer.trainer_kit import make_spec


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    def __init__(self, store: Store, claim: Claim, **spec: Any) -> None:
        self.store, self.claim, self.clock = store, claim, Clock()
        self.intake = SimpleNamespace(num_turns=7, newest_turns=[], num_ended=lambda group: {0: 3, 1: 2, 2: 1}[group])
        status = JobStatusBoard(store, claim)
        self.offered, self.waiting = 0, set[int]()
        services = SimpleNamespace(intake=self.intake, clock=self.clock, status=status, store=store, bus=self)
        given = make_spec(groups_per_step=2, rollout={"group_size": 4}, **spec)
        late = SimpleNamespace(waiting=lambda owed: self.waiting.intersection(owed))
        lineage = SimpleNamespace(step=6)
        context: Any = SimpleNamespace(services=services, spec=given, job=claim.job_id, lineage=lineage, late=late)
        self.progress = StepProgress(context)
        self.progress.begin()

    async def num_offered(self, job: str) -> int:
        assert job == self.claim.job_id
        return self.offered

    async def look(self, after_s: float) -> str:
        self.clock.now += after_s
        await self.progress.look([0, 1, 2], [2])
        return await self.said()

    async def said(self) -> str:
        reason = (await self.store.jobs.get(self.claim.job_id)).status_reason
        assert reason is not None
        return reason.message


@pytest.fixture
async def stage(store: Store, claim: Claim, redis_client: Redis) -> Stage:
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    return Stage(store, claim)


async def test_a_step_that_takes_long_says_how_far_it_has_come(stage: Stage) -> None:
    assert await stage.look(QUIET_S - 0.1) == "episodes are running"
    stage.intake.num_turns += 41
    ended = "step 7: 7 of 8 episodes and 1 of 2 groups have ended"
    said = f"{ended}; 246 turns a minute; no turn has ended yet (a start may take 60 s)"
    assert await stage.look(0.1) == said
    stage.intake.num_turns += 100
    assert await stage.look(RETELL_S - 1) == said  # not every second
    stage.intake.newest_turns = [TimeSplit(0.2, 4.0, 0.0)] * 3
    assert (await stage.look(1)).endswith("turns a minute, most of each for the environment (4.0 s)")
    await stage.progress.end()
    assert await stage.said() == "episodes are running"


async def test_an_hour_of_waiting_leaves_few_events_and_files_and_the_newest_words(
    redis_client: Redis, tmp_path: Path
) -> None:
    jobs_dir = JobsDir(tmp_path)
    store = Store(redis_client, jobs_dir=jobs_dir)
    await store.load_functions()
    await store.jobs.create('{"name": "test"}')
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    stage = Stage(store, claim)

    async def num_events() -> int:
        return len(await store.events.read(claim.job_id, count=1000))

    def num_files() -> int:
        return len(list(jobs_dir.job(claim.job_id).statuses.iterdir()))

    events, files, told_at_s = await num_events(), num_files(), list[float]()
    waited_s, said = 0.0, await stage.look(QUIET_S - RETELL_S)
    while waited_s < 3600:
        waited_s = stage.clock.now - 100 + RETELL_S
        stage.intake.num_turns += int(waited_s)
        before, said = said, await stage.look(RETELL_S)
        assert said != before
        if await num_events() > events + len(told_at_s):
            told_at_s.append(waited_s)
    assert told_at_s == [10, 25, 55, 115, 235, 475, 955, 1555, 2155, 2755, 3355]
    # who wishes what is so already finds other words on disk, and adds nothing either
    for wish, num_added in (("running", 11), ("paused", 12)):
        await Store(redis_client, jobs_dir=jobs_dir).jobs.set_desired_state(claim.job_id, wish)
        assert (await num_events() - events, num_files() - files) == (num_added, num_added)


async def test_newer_words_replace_no_other_reason(stage: Stage) -> None:
    claim, jobs = stage.claim, stage.store.jobs
    reason = StatusReason("no_engine_for_model", "all engines are gone")
    await jobs.set_status(claim.job_id, "running", token=claim.token, reason=reason)
    await jobs.retell(claim.job_id, claim.token, StatusReason("waiting_for_trajectories", "step 7"))
    assert await stage.said() == "all engines are gone"
    with pytest.raises(Fenced):
        await jobs.retell(claim.job_id, "another", reason)


async def test_it_says_what_waits_for_others(store: Store, claim: Claim) -> None:
    await store.jobs.set_status(claim.job_id, "running", token=claim.token)
    pulled = [{"ref": "tests:agent", "agent": {"pull": True}}]
    stage = Stage(store, claim, environments=pulled, rewards={"deadline_s": 7200})
    stage.offered = 5
    fetched = f"; 5 episodes wait to be fetched (POST /v1/jobs/{claim.job_id}/episodes:lease)"
    ended = "step 7: 7 of 8 episodes and 1 of 2 groups have ended"
    assert await stage.look(QUIET_S) == f"{ended}{fetched}; 0 turns a minute"
    stage.waiting = {1, 2, 9}
    rewarded = "; 2 groups wait for rewards (up to 7200 s)"
    assert await stage.look(RETELL_S) == f"{ended}{fetched}{rewarded}; 0 turns a minute"
    stage.offered = 0
    assert await stage.look(RETELL_S) == f"{ended}{rewarded}; 0 turns a minute"
    stage.waiting = set()
    assert "wait" not in await stage.look(RETELL_S)
    stage.intake.newest_turns = [TimeSplit(0.2, 0.0, 4.0)] * 3
    assert (await stage.look(RETELL_S)).endswith(", most of each for waiting to be fetched or for a place (4.0 s)")


async def test_it_talks_over_nobody(stage: Stage) -> None:
    claim = stage.claim
    reason = StatusReason("no_engine_for_model", "all engines are gone")
    await stage.store.jobs.set_status(claim.job_id, "running", token=claim.token, reason=reason)
    assert await stage.look(QUIET_S) == "all engines are gone"
    await stage.progress.end()
    assert await stage.said() == "all engines are gone"
