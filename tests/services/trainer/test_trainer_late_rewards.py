"""Steps go on while groups wait for their rewards; when these come, tokens are trained with their true age, once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from gspo_core.codec import decode, encode
from gspo_core.log.batches import LoggedBatch
from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning
from gspo_core.log.steps import train_again
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Outcome, StopReason
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.state.jobs import CancelManner, DesiredState
from services.state.queue import Append, Bus
from services.state.queue_records import AwaitedReward, RewardWord, Waiting
from services.state.store import Claim
from services.trainer.building import make_learner
from services.trainer.groups.late_rewards import LateRewardWatch
from services.trainer.run import JobRun
from tests.core.learner_support import write_model
from tests.services.rollout.rollout_kit import until
from tests.services.trainer.loop_kit import (
    DEADLINE_S,
    Hook,
    Loop,
    a_loop,
    after_each_step,
    fingerprint,
    loop_spec,
    saved,
)
from tests.services.trainer.trainer_kit import stop

HOUR = 3600.0


class Hours:
    """Unix seconds, moved by hand."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class LateJob:
    """A job of agents; the members of ``late`` end without their reward, which comes when a test says so."""

    loop: Loop
    now: Hours
    late: set[tuple[int, int]]
    waiting: dict[EpisodeKey, tuple[int, float]] = field(default_factory=dict)
    """Attempt and reward of what waits."""

    def begin(self) -> None:
        """From now on episodes of ``late`` wait."""
        real, job = self.loop.bus.append, self

        async def append(name: str, token: str, appends: list[Append]) -> None:
            last = appends[-1] if appends else None
            if last is None or not last.final or (last.key.group, last.key.member) not in job.late:
                await real(name, token, appends)
                return
            segment = decode(last.payload)
            outcome = segment.outcome
            assert outcome is not None
            nothing = replace(segment, outcome=Outcome(StopReason.NO_REWARD))
            await real(name, token, appends[:-1])
            end = replace(last, payload=encode(nothing))
            assert outcome.reward is not None
            job.waiting[last.key] = (last.attempt, outcome.reward)
            await job.loop.bus.await_reward(token, end, b"", job.now() + HOUR)

        self.loop.bus.append = append  # type: ignore[method-assign]

    async def pay_all(self) -> None:
        for key in list(self.waiting):
            assert await self.pay(key) is RewardWord.TAKEN

    async def let_an_hour_pass(self) -> None:
        """The steps that are left may take less time than the trainer lets pass between two looks."""
        self.now.now += HOUR + 1
        await until(self._nothing_waits)

    async def _nothing_waits(self) -> bool:
        return (await self.loop.bus.waiting(self.loop.job)).num_episodes == 0

    async def pay(self, key: EpisodeKey) -> RewardWord:
        attempt, reward = self.waiting.pop(key)
        bus, name = self.loop.bus, f"{key}"
        found = await bus.look_at_reward(key, attempt, name, self.now())
        if not isinstance(found, AwaitedReward):
            return found
        segment = replace(decode(found.payload), outcome=Outcome(StopReason.COMPLETED, reward))
        end = Append(key, attempt, segment.index, encode(segment), final=True)
        return await bus.settle_reward(end, name, seen=0, now=self.now())

    async def run(self) -> None:
        claim = await self.loop.claim()
        await asyncio.wait_for(self.loop.run_of(claim, now=self.now).run(), DEADLINE_S)

    def batches(self) -> list[LoggedBatch]:
        log = BatchLog(JobDir(self.loop.job_dir))
        return [log.read(position.epoch, position.step) for position in log.steps()]

    @staticmethod
    def groups(batch: LoggedBatch) -> list[int]:
        return [group.group for group in batch.groups]

    def trained(self) -> dict[int, int]:
        """The step of each group that was trained."""
        return {group: batch.step for batch in self.batches() for group in self.groups(batch)}

    async def counters(self) -> dict[str, int]:
        return await self.loop.bus.counters(self.loop.job)

    async def metrics(self) -> list[dict[str, Any]]:
        return await self.loop.store.metrics.read(self.loop.job)


Play = Callable[..., Any]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    return after_each_step(monkeypatch)


@pytest.fixture
def late_job(redis_client: Redis, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Tokens are withheld from the fifth step after theirs on."""

    @contextlib.asynccontextmanager
    async def make(late: Collection[tuple[int, int]], **changes: Any) -> AsyncIterator[LateJob]:
        given: dict[str, Any] = {
            "environments": [{"ref": "made:Here", "agent": {}}],
            "rollout": {"group_size": 2, "max_staleness": 1},
            "steps": 10,
        }
        changes["rewards"] = {"deadline_s": HOUR, **changes.get("rewards", {})}
        spec = loop_spec(model_dir, **(given | changes))
        async with a_loop(redis_client, tmp_path / "jobs", spec, monkeypatch) as loop:
            job = LateJob(loop, Hours(), set(late))
            job.begin()
            yield job

    return make


def after(step: int, act: Callable[[], Awaitable[None]]) -> Hook:
    async def hook(_: JobRun, trained: int) -> None:
        if trained == step:
            await act()

    return hook


async def test_steps_go_on_and_late_tokens_are_trained_with_their_true_age(late_job: Play, hooks: list[Hook]) -> None:
    async with late_job({(0, 1), (3, 0)}) as job:
        hooks.append(after(3, job.pay_all))
        await job.run()
        steps = job.trained()
        assert [steps[group] for group in (1, 2, 4, 5, 6, 7)] == [1, 1, 2, 2, 3, 3]
        assert Counter(steps.values()) == dict.fromkeys(range(1, 11), 2)
        assert {steps[0], steps[3]} <= {4, 5}
        (batch, *_) = [one for one in job.batches() if 0 in [group.group for group in one.groups]]
        assert batch.extra["staleness"]["0"] == batch.step - 1
        assert "late" not in batch.extra
        assert (await job.counters()) == {"dispatched": 20, "trained": 20, "evaluated": 0, "in_flight": 0}
        rows = await job.metrics()
        assert sum(row["rewards/late"] for row in rows) == 2
        assert sum(row["rewards/late_groups"] for row in rows) == 2
        assert max(row["rewards/waiting_groups"] for row in rows) == 2
        assert rows[-1]["rewards/waiting_groups"] == 0


@pytest.mark.parametrize("on_late_reward", ["train", "mask", "drop"])
async def test_what_is_too_old_is_trained_masked_or_dropped(
    late_job: Play, hooks: list[Hook], on_late_reward: str
) -> None:
    async with late_job({(0, 1)}, rewards={"on_late_reward": on_late_reward}) as job:
        hooks.append(after(6, job.pay_all))
        await job.run()
        steps, counters = job.trained(), await job.counters()
        if on_late_reward == "drop":
            assert 0 not in steps
            assert (counters["dropped_late"], counters["trained"]) == (1, 20)
            return
        (batch,) = [one for one in job.batches() if 0 in [group.group for group in one.groups]]
        row = (await job.metrics())[batch.step - 1]
        num_tokens = sum(one.num_actions for one in batch.trajectories)
        num_late = sum(one.num_actions for group in batch.groups if group.group == 0 for one in group)
        is_trained = on_late_reward == "train"
        assert batch.extra.get("late") == ([0] if is_trained else None)
        assert row["tokens/trained"] == num_tokens - (0 if is_trained else num_late)
        assert batch.extra["staleness"]["0"] > job.loop.spec.rollout.staleness_cap
        # What was decided then is what a replay of the logs does.
        learner, lineage, tuning = make_learner(job.loop.spec), Lineage(), Tuning(job.loop.spec)
        for one in job.batches():
            train_again(learner, lineage, one, tuning)
        assert fingerprint(learner) == fingerprint(saved(job.loop))


async def test_a_reward_that_never_comes_costs_its_member_alone(late_job: Play, hooks: list[Hook]) -> None:
    async with late_job({(0, 1)}) as job:
        hooks.append(after(2, job.let_an_hour_pass))
        await job.run()
        (batch,) = [one for one in job.batches() if 0 in [group.group for group in one.groups]]
        (group,) = [one for one in batch.groups if one.group == 0]
        assert [one.outcome.stop_reason for one in group] == [StopReason.COMPLETED, StopReason.NO_REWARD]
        rows = await job.metrics()
        assert rows[batch.step - 1]["stop/no_reward"] == 1
        assert sum(row["rewards/missed"] for row in rows) == 1
        assert await job.pay(*job.waiting) is RewardWord.ENDED


@pytest.mark.parametrize(("attempt", "num_early"), [(1, 2), (2, 0)])
async def test_rewards_that_came_before_the_first_look_count(attempt: int, num_early: int) -> None:
    """Once: how many of them an earlier attempt has reported is unknown, and most are."""
    counted = [Waiting(num_late=2, num_missed=2), Waiting(num_late=3, num_missed=2)]

    class Looked:
        async def waiting(self, job_id: str) -> Waiting:
            return counted.pop(0)

    spec = JobSpec.model_validate(
        {
            "model": "made",
            "environments": [{"ref": "made:Here", "agent": {}}],
            "steps": 1,
            "rewards": {"deadline_s": HOUR},
        }
    )
    watch = LateRewardWatch(cast(Bus, Looked()), Claim("a", "", 1, attempt), lambda: spec)
    found = []
    while counted:
        await watch.look()
        row = watch.metrics(0)
        found.append((row["rewards/late"], row["rewards/missed"]))
    assert found == [(num_early, num_early), (1, 0)]


async def test_a_trainer_that_takes_over_waits_for_what_waited(late_job: Play, hooks: list[Hook]) -> None:
    """The first one is lost while two groups wait; one reward comes in between, the other later."""
    async with late_job({(0, 1), (1, 1)}) as job:
        lost = asyncio.Event()

        async def lose() -> None:
            lost.set()
            await asyncio.Event().wait()

        hooks.append(after(3, lose))
        running = asyncio.create_task(job.run())
        await lost.wait()
        await stop(running)
        hooks.clear()
        first, second = sorted(job.waiting)
        assert await job.pay(first) is RewardWord.TAKEN
        hooks.append(after(4, job.pay_all))
        await job.run()
        assert Counter(group for one in job.batches() for group in job.groups(one)) == dict.fromkeys(job.trained(), 1)
        assert {first.group, second.group} <= set(job.trained())
        assert (await job.counters())["trained"] == 20


async def test_no_more_groups_wait_than_the_job_allows(late_job: Play, hooks: list[Hook]) -> None:
    """Four that may be played beside one that waits: with five of them waiting, nothing is begun any more."""
    late = {(group, 0) for group in range(20)}
    async with late_job(late, rewards={"max_waiting_groups": 1}) as job:
        running = asyncio.create_task(job.run())
        await until(lambda: len(job.waiting) == 5)
        assert (await job.counters())["dispatched"] == 5
        job.late.clear()
        await job.pay_all()
        await running
        assert set(range(5)) <= set(job.trained())


async def test_a_job_that_is_cancelled_waits_for_no_reward(late_job: Play, hooks: list[Hook]) -> None:
    async with late_job({(0, 0), (1, 1), (2, 0), (2, 1)}) as job:
        jobs = job.loop.store.jobs

        async def cancel() -> None:
            await jobs.set_desired_state(job.loop.job, DesiredState.CANCELLED, manner=CancelManner.DRAIN)

        hooks.append(after(2, cancel))
        await job.run()
        assert set(range(3)).isdisjoint(job.trained())
