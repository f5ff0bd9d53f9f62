"""Episodes made by hand, for the tests of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from services.state.fleet import Fleet
from services.state.fleet_records import EngineReport
from services.state.store import Claim, Store
from services.trainer.attempt import Attempt
from services.trainer.run import JobRun
from services.trainer.telling.attempt_messages import AttemptEnd
from tests.patience import HANG_S

# For what surely comes, on a machine that is busy.
DEADLINE_S = HANG_S


def make_spec(**changes: Any) -> JobSpec:
    """The least that a job must say, and ``changes``."""
    return JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}]} | changes)


@contextlib.contextmanager
def marked(fleet: Fleet) -> Iterator[Mapping[str, set[str]]]:
    """The states that each engine is marked with meanwhile: one that lasts for a moment is among them too."""
    seen: defaultdict[str, set[str]] = defaultdict(set)
    mark = fleet.mark

    async def noted(job: str, token: str, engine_id: str, report: EngineReport) -> bool:
        seen[engine_id].add(str(report.state))
        return await mark(job, token, engine_id, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "mark", noted)
        yield seen


class InProcess:
    """Attempts in the process of the test; ``check`` raises what is to end the trainer."""

    def __init__(
        self, store: Store, make_run: Callable[[Claim, JobSpec], JobRun], check: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._make_run, self._check = store, make_run, check

    def is_ready(self) -> bool:
        self._check()
        return True

    async def run(self, claim: Claim, spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        return await Attempt(self._store, claim, self._make_run(claim, spec), self._check).run(stop, leaving)


async def stop(task: asyncio.Task[None]) -> None:
    """Before Python 3.12 the Redis client may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)


def segment(key: EpisodeKey, index: int, version: int, num_actions: int, **changes: object) -> Segment:
    """One observation token, then ``num_actions`` sampled ones."""
    values: dict[str, object] = {
        "key": key,
        "attempt": 0,
        "branch": 0,
        "index": index,
        "turn": index,
        "version": version,
        "temperature": 1.0,
        "engine_id": "engine",
        "token_ids": [7, *range(10, 10 + num_actions)],
        "action_mask": [False, *[True] * num_actions],
        "behavior_logprobs": [0.0, *[-0.5 - index] * num_actions],
    }
    return Segment(**(values | changes))  # type: ignore[arg-type]


def episode(
    group: int, member: int, reward: float | None, versions: Sequence[int], turn_rewards: Sequence[float | None] = ()
) -> Trajectory:
    """One turn of three actions per entry of ``versions``."""
    key = EpisodeKey("job_a", group, member)
    reason = StopReason.ENV_ERROR if reward is None else StopReason.COMPLETED
    segments = []
    for index, version in enumerate(versions):
        outcome = Outcome(reason, reward) if index == len(versions) - 1 else None
        turn_reward = turn_rewards[index] if turn_rewards else None
        segments.append(segment(key, index, version, 3, outcome=outcome, turn_reward=turn_reward))
    return Trajectory(tuple(segments))


def group(number: int, rewards: Sequence[float | None], versions: Sequence[int] = (0, 0)) -> Group:
    episodes = tuple(episode(number, member, reward, versions) for member, reward in enumerate(rewards))
    return Group("job_a", number, Split.TRAIN, number, len(rewards), episodes)
