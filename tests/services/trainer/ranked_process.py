"""One rank of a trainer: torchrun runs it as ``ranked_process.py ROOT REDIS_URL CASE...``. It holds no test.

The first rank runs the cases in turn and leaves the results in the directory; the others follow it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d

sys.path.insert(0, str(Path(__file__).parents[3]))

from gspo_core import codec
from gspo_core.log.batches import BatchExtra, LoggedBatch
from gspo_core.log.settings import learner_config
from gspo_core.spec import JobSpec
from gspo_core.types import EpisodeKey, Group, Outcome, Segment, Split, StopReason, Trajectory
from services.files.batch_log import BatchLog
from services.files.data_dir import DataDir
from services.files.job_dir import JobDir
from services.state.client import connect
from services.trainer.building import make_ranked_learner
from services.trainer.ranks import follower
from services.trainer.ranks.calls import LINES
from services.trainer.ranks.follower import FirstRankLost, Follower
from services.trainer.ranks.followers import Followers, RanksLost
from services.trainer.ranks.learner import RankedLearner
from services.trainer.ranks.lines import RankPlace, meet
from tests.core.learner_support import VOCABULARY, make_sequences
from tests.services.trainer.loop_kit import (
    Fate,
    Loop,
    a_loop,
    child_spec,
    fork_of,
    loop_spec,
    serve,
    serve_although_killed,
)

# Nothing of what was made up is far enough from the policy to be left out.
OPEN = {
    "minibatches": 2,
    "k3_gate": None,
    "outlier_gate": None,
    "off_policy_gate": None,
    "advantage": {"turn_reward_weight": 0.5},
}
NUM_EPISODES = 7


def spec_of(root: Path, **changes: Any) -> JobSpec:
    return loop_spec(root / "model", steps=4, **changes)


def refuse(*_: object, **__: object) -> NoReturn:
    raise AssertionError("objects are pickled between ranks")


def refuse_others(original: Callable[..., bytes]) -> Callable[..., bytes]:
    """The loop's player alone makes bytes of segments. It lives in the main thread; the trainer works in others."""

    def meta_bytes(segment: Segment, schema: int) -> bytes:
        assert threading.current_thread() is threading.main_thread(), f"{segment.key} is encoded a second time"
        return original(segment, schema)

    return meta_bytes


def episode(number: int, member: int, dice: np.random.Generator) -> Trajectory:
    """Two turns, sampled by two versions; of some members a turn is paid."""
    segments = []
    for turn in range(2):
        ids = dice.integers(0, VOCABULARY, int(dice.integers(9, 25)))
        acts = np.arange(len(ids)) >= 7
        segments.append(
            Segment(
                key=EpisodeKey("job_a", number, member),
                attempt=0,
                branch=0,
                index=turn,
                turn=turn,
                version=turn,
                temperature=0.7 if member % 3 else 1.0,
                engine_id="engine",
                token_ids=ids.astype(np.int32),
                action_mask=acts,
                behavior_logprobs=np.where(acts, -4.0, 0.0).astype(np.float32),
                turn_reward=float(dice.random()) if member % 2 else None,
                outcome=Outcome(StopReason.COMPLETED, float(dice.random())) if turn else None,
            )
        )
    return Trajectory(tuple(segments))


def batch(number: int) -> LoggedBatch:
    """What is logged as step ``number`` of epoch 1."""
    dice = np.random.default_rng(number)
    episodes = tuple(episode(number, member, dice) for member in range(NUM_EPISODES))
    extra: BatchExtra = {"dropped": {}, "staleness": {"0": 3, "1": number}}
    return LoggedBatch(1, number, (Group("job_a", number, Split.TRAIN, 0, NUM_EPISODES, episodes),), extra)


class Cases:
    def __init__(self, root: Path, redis_url: str, followers: Followers, place: RankPlace) -> None:
        self.root, self.redis_url = root, redis_url
        self.followers, self.place = followers, place
        self.spec = spec_of(root)

    def learner(self, job: Path, **changes: Any) -> RankedLearner:
        return make_ranked_learner(spec_of(self.root, **changes), JobDir(job), self.place, self.followers)

    def learner_of(self, loop: Loop) -> Callable[[], RankedLearner]:
        return lambda: self.learner(loop.job_dir)

    async def loop(self, name: str, spec: JobSpec, run: Callable[[Any], Any]) -> None:
        """A whole job; its directory is ``name``/job."""
        async with connect(self.redis_url) as redis:
            await redis.flushall()
            with pytest.MonkeyPatch.context() as patch:
                async with a_loop(redis, self.root / name, spec, patch) as loop:
                    await run(loop)
        loop.job_dir.rename(self.root / name / "job")

    async def undisturbed(self) -> None:
        await self.loop("undisturbed", self.spec, self.forked)

    async def forked(self, parent: Loop) -> None:
        """Fed its parent's batches; its directory is ``forked``."""
        await serve(parent, self.learner_of(parent))
        child = await fork_of(parent, child_spec(parent, 2, same_batches=True))
        await serve(child, self.learner_of(child))
        child.job_dir.rename(self.root / "forked")

    async def killed(self) -> None:
        fate, spec = Fate(0, 0.03), spec_of(self.root, checkpoint_every=3)
        await self.loop("killed", spec, lambda loop: serve_although_killed(loop, fate, {1, 3}, self.learner_of(loop)))
        (self.root / "killed" / "points.json").write_text(json.dumps(fate.points))

    async def from_one_rank(self) -> None:
        """Goes on where one rank has stopped; then it is asked for what some rank cannot do, and goes on again."""
        job = self.root / "two" / "job"
        for step in (1, 2):
            BatchLog(JobDir(job)).write(1, step, batch(step).groups, batch(step).extra)
        learner = self.learner(job, objective=OPEN)
        learner.load_state(self.root / "one" / "state")
        learner.logged_step(batch(1))
        state = self.root / "two" / "state"
        learner.copy_state().write(state)
        found = {"lost": problem_of(lambda: learner.load_state(self.damaged(state)))}
        occupied = self.root / "two" / "occupied"
        (occupied / "share-00001").mkdir(parents=True)
        found["write"] = problem_of(lambda: learner.copy_weights().write(occupied))
        other = self.spec.optimizer.model_copy(update={"betas": (0.5, 0.5)})
        config = learner_config(self.spec.model_copy(update={"optimizer": other}))
        found["retune"] = problem_of(lambda: learner.retune(config, self.spec.training_objective))
        _, metrics = learner.logged_step(batch(2))
        scores = learner.logprobs(make_sequences(NUM_EPISODES))
        learner.copy_weights().write(self.root / "two" / "weights")
        found |= {"metrics": metrics, "scores": [float(one.sum()) for one in scores]}
        (self.root / "two" / "found.json").write_text(json.dumps(found))
        learner.close()

    async def unseen(self) -> None:
        """The step's log is nowhere to be seen for the other rank."""
        learner = self.learner(self.root / "unseen" / "job", objective=OPEN)
        try:
            learner.logged_step(batch(1))
        except RanksLost as error:
            (self.root / "unseen.txt").write_text(str(error))

    def damaged(self, state: Path) -> Path:
        """What only the second rank reads is cut off."""
        other = state.with_name("damaged")
        shutil.copytree(state, other)
        (path,) = other.glob("rank-00001.*")
        path.write_bytes(path.read_bytes()[:-8])
        return other


def problem_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


async def run(root: Path, redis_url: str, names: list[str], followers: Followers, place: RankPlace) -> None:
    followers.look(DataDir(root))
    made = Cases(root, redis_url, followers, place)
    for name in names:
        await getattr(made, name)()


def main(root: Path, redis_url: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in ("_object_to_tensor", "_tensor_to_object"):
        setattr(distributed_c10d, name, refuse)
    pickle.dumps = pickle.loads = refuse
    place = RankPlace.of_this_process()
    lines = meet(place, LINES)
    if not place.is_first:
        codec._meta_bytes = refuse
        follower.SEEN_WITHIN_S = 0.5
        with contextlib.suppress(FirstRankLost) if "unseen" in names else contextlib.nullcontext():
            Follower(lines, place).follow()
        return
    codec._meta_bytes = refuse_others(codec._meta_bytes)
    followers = Followers(lines, beat_s=0.1)
    asyncio.run(run(root, redis_url, list(names), followers, place))
    followers.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
