"""The trainer asks for a batch with what has arrived of its groups, and says which episode it waits for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gspo_core.codec import encode
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from gspo_core.staleness import Choice, token_staleness
from gspo_core.types import EpisodeKey, Group, Outcome, Split, StopReason, Trajectory
from services.state.queue import Append, Bus, LeasedEpisode
from services.state.queue_records import DropReason
from services.state.store import Claim, Store
from services.trainer.groups.intake import Intake
from services.trainer.groups.selection import Selection, no_tokens, nothing_to_train, refusal
from services.trainer.telling.status import JobStatusBoard
from tests.services.trainer.trainer_kit import DEADLINE_S, episode, group, segment, stop

STEP = 6
# Version n was published after n steps.
TABLE = {version: Position(0, version) for version in range(STEP + 1)}


def ages(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    return token_staleness(versions, TABLE, Position(0, STEP), {})


def spec(**rollout: Any) -> JobSpec:
    return JobSpec(
        model="m",
        environments=[{"ref": "a:B"}],
        groups_per_step=1,
        rollout={"group_size": 2, "max_staleness": 1, "staleness_cap": 4, **rollout},
    )


@dataclass
class Stage:
    """A job with three groups of one episode; a worker holds them and appends what a test says."""

    bus: Bus
    store: Store
    claim: Claim
    intake: Intake
    token: str = ""
    leases: dict[int, LeasedEpisode] = field(default_factory=dict)
    now: float = 0.0

    async def begin(self) -> None:
        job = self.claim.job_id
        for number in range(3):
            await self.bus.dispatch(job, self.claim.token, number, size=1, split=Split.TRAIN, task_index=0)
        self.token = await self.bus.join("worker")
        self.leases = {one.key.group: one for one in await self.bus.lease(job, "worker", self.token, 3)}

    async def append(self, number: int, versions: list[int], *, upto: int | None = None) -> None:
        """Segments of group ``number``, one per version; all of them end the episode."""
        segments = [replace(one, key=self.leases[number].key) for one in episode(0, 0, 1.0, versions).segments[:upto]]
        known = self.intake.num_segments
        appends = [Append(one.key, 0, one.index, encode(one), one.is_final) for one in segments]
        await self.bus.append(self.claim.job_id, self.token, appends)
        async with asyncio.timeout(DEADLINE_S):
            while self.intake.num_segments == known:
                await self.intake.progress(known)

    def selection(self, **rollout: Any) -> Selection:
        board = JobStatusBoard(self.store, self.claim)
        return Selection(spec(**rollout), self.intake, board, lambda: self.now, {number: 3 for number in range(3)})

    async def choose(self, selection: Selection) -> Choice:
        ready = {one.group for one in await self.intake.complete(Split.TRAIN)}
        return selection.choose([0, 1, 2], ready, STEP, ages)

    async def told(self) -> str:
        reason = (await self.store.jobs.get(self.claim.job_id)).status_reason
        assert reason is not None
        return f"{reason.code}: {reason.message}"


@pytest.fixture
async def stage(bus: Bus, store: Store, claim: Claim) -> AsyncIterator[Stage]:
    stage = Stage(bus, store, claim, Intake(bus, claim.job_id))
    await stage.begin()
    reading = asyncio.create_task(stage.intake.run())
    yield stage
    await stop(reading)


async def test_the_age_of_unfinished_episodes_is_known(stage: Stage) -> None:
    await stage.append(1, [5])
    await stage.append(0, [1, 2], upto=1)
    assert await stage.choose(stage.selection(on_stale="mask")) == Choice(train=(1,))
    # Version 1 is 5 steps old and the cap is 4: it will never be trained, so nobody needs to finish it.
    assert await stage.choose(stage.selection(on_stale="drop")) == Choice(train=(1,), drop=(0,))


async def test_it_waits_for_the_episode_at_its_last_step_and_says_which(stage: Stage) -> None:
    await stage.store.jobs.set_status(stage.claim.job_id, "running", token=stage.claim.token)
    await stage.append(1, [5])
    await stage.append(0, [2, 3], upto=1)
    selection = stage.selection(on_stale="wait")
    choice = await stage.choose(selection)
    assert choice == Choice(wait_for=(0,))
    await selection.explain(choice, STEP)
    assert await stage.told() == (
        "waiting_for_trajectories: step 7 waits up to 600 s for episodes that would exceed staleness_cap: "
        f"{stage.claim.job_id}/0/0"
    )
    await stage.append(0, [2, 3])
    assert await stage.choose(selection) == Choice(train=(0,))
    await selection.is_over()
    assert await stage.told() == "waiting_for_trajectories: episodes are running"


async def test_waiting_has_a_limit(stage: Stage) -> None:
    await stage.store.jobs.set_status(stage.claim.job_id, "running", token=stage.claim.token)
    await stage.append(1, [5])
    await stage.append(0, [2, 3], upto=1)
    selection = stage.selection(on_stale="wait", stale_wait_s=60)
    await selection.explain(await stage.choose(selection), STEP)
    stage.now = 59.9
    assert await stage.choose(selection) == Choice(wait_for=(0,))
    stage.now = 60.0
    assert await stage.choose(selection) == Choice(train=(1,))


@pytest.mark.parametrize(
    ("rewards", "on_partial_group", "reason"),
    [
        ([1.0, 0.0], "all", None),
        ([None, None], "all", "dropped_partial"),
        ([1.0, None], "drop", "dropped_partial"),
        ([1.0, 1.0], "all", "dropped_zero_variance"),
    ],
)
def test_what_is_never_trained(rewards: list[float | None], on_partial_group: str, reason: str | None) -> None:
    job = spec(on_partial_group=on_partial_group)
    advantage = job.objective.advantage.model_copy(update={"zero_variance": "drop"})
    objective = job.objective.model_copy(update={"advantage": advantage})
    assert refusal(group(0, rewards), job.model_copy(update={"objective": objective})) == reason


def overflowed(number: int, bound: int, models: int) -> Group:
    """A group of which every prompt was too long."""
    found = {"prompt_tokens": 5321.0, "context_tokens": float(bound), "model_context_tokens": float(models)}
    outcome = Outcome(StopReason.CONTEXT_OVERFLOW, 0.0, metrics=found)
    return unsampled(number, outcome)


def unsampled(number: int, outcome: Outcome) -> Group:
    keys = [EpisodeKey("job_a", number, member) for member in range(2)]
    nothing = {"token_ids": [], "action_mask": [], "behavior_logprobs": []}
    episodes = tuple(Trajectory((segment(key, 0, 0, 0, outcome=outcome, **nothing),)) for key in keys)
    return Group("job_a", number, Split.TRAIN, 7, 2, episodes)


@pytest.mark.parametrize(
    ("bound", "models", "whose"),
    [(4096, 4096, "the model's context"), (4096, 40960, "limits.max_context_tokens")],
)
def test_a_prompt_that_does_not_fit_is_a_sentence_with_both_numbers(bound: int, models: int, whose: str) -> None:
    empty = overflowed(0, bound, models)
    assert refusal(empty, spec()) == "dropped_no_tokens"
    reason = no_tokens(empty, "worlds:Long")
    said = f"the prompt of task 7 of worlds:Long has 5,321 tokens; {whose} is 4,096"
    assert (reason.code, reason.message) == ("prompt_too_long", said)
    failure = nothing_to_train(Counter(dropped_no_tokens=9, dropped_stale=1), reason)
    assert (failure.code, str(failure)) == ("prompt_too_long", f"{said}; 9 groups in a row left nothing to train")


def test_a_group_without_a_sampled_token_says_how_its_episodes_ended() -> None:
    empty = unsampled(0, Outcome(StopReason.EPISODE_TIMEOUT, 0.0))
    assert refusal(empty, spec()) == "dropped_no_tokens"
    reason = no_tokens(empty, "worlds:Slow")
    assert reason.code == "no_tokens_sampled"
    assert reason.message.endswith("of worlds:Slow ended before a token was sampled: 2 by episode_timeout")


def test_groups_without_rewards_say_how_their_episodes_ended() -> None:
    dropped: Counter[DropReason] = Counter(dropped_partial=8)
    late = str(nothing_to_train(dropped, None, Counter({StopReason.NO_REWARD: 14, StopReason.ENV_ERROR: 2})))
    assert "without a reward (14 by no_reward, 2 by env_error): nobody posted one within rewards.deadline_s" in late
    ill = str(nothing_to_train(dropped, None, Counter({StopReason.ENV_ERROR: 16})))
    assert "(16 by env_error), for reasons outside the policy: see the env.health events" in ill
    assert nothing_to_train(dropped).code == "env_unhealthy"


def test_a_group_of_which_one_episode_sampled_is_trained() -> None:
    empty = overflowed(0, 4096, 4096)
    some = replace(empty, trajectories=(episode(0, 0, 1.0, [0]), list(empty)[1]))
    assert refusal(some, spec()) is None
    without_reward = replace(empty, trajectories=(episode(0, 0, None, [0]), list(empty)[1]))
    assert refusal(without_reward, spec()) == "dropped_no_tokens"
