"""A trainer that takes over trains what was logged once more, to the same weights, from the files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_core.learner import Learner
from gspo_core.log.erasing import without_texts
from gspo_core.log.lineage import Lineage
from gspo_core.log.settings import Tuning
from gspo_core.log.steps import train_again
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.position import Position
from gspo_core.spec import JobSpec
from gspo_core.types import Group, Split, Trajectory
from services.files.batch_log import BatchLog
from services.files.job_dir import JobDir
from services.trainer.past.replay import replay
from tests.core import learner_support
from tests.core.learner_support import largest_difference, weights, write_model
from tests.services.trainer.trainer_kit import episode


def tuning() -> Tuning:
    return Tuning(SPEC)


FORKS = {1: Position(0, 0)}
SPEC = JobSpec.model_validate({"model": "m", "environments": [{"ref": "a:B"}]})
OBJECTIVE = ObjectiveConfig(minibatches=1, staleness_cap=4, k3_gate=None, outlier_gate=None)


def make_learner(model_dir: Path) -> Learner:
    return learner_support.make_learner(model_dir, OBJECTIVE)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def group(number: int, rewards: Sequence[float], versions: Sequence[int] = (0, 0)) -> Group:
    """Members of different lengths: those of equal ones would cancel each other's gradient."""
    episodes = [
        episode(number, member, reward, [*versions, *[versions[-1]] * member]) for member, reward in enumerate(rewards)
    ]
    return Group("job_a", number, Split.TRAIN, number, len(rewards), tuple(map(as_of_the_model, episodes)))


def as_of_the_model(trajectory: Trajectory) -> Trajectory:
    """With the log-probs that a model without training has, else the gates would take everything away."""
    even = -math.log(learner_support.VOCABULARY)
    return Trajectory(
        tuple(replace(one, behavior_logprobs=np.where(one.action_mask, even, 0)) for one in trajectory.segments)
    )


def logged(log: BatchLog, epoch: int, step: int, groups: list[Group], **extra: Any) -> None:
    base = {"version": step, "num_dispatched": 8, "dropped": {}, "staleness": {"0": step - 1, "1": step - 1}}
    log.write(epoch, step, groups, base | extra)


@pytest.fixture
def log(tmp_path: Path) -> BatchLog:
    """Three steps of epoch 1; on the way group 2 was dropped."""
    log = BatchLog(JobDir(tmp_path))
    logged(log, 1, 1, [group(0, [1.0, 0.0]), group(1, [0.0, 1.0], versions=(0, 1))])
    logged(log, 1, 2, [group(3, [1.0, 0.0, 0.0])], dropped={"dropped_stale": [2]})
    logged(log, 1, 3, [group(4, [0.0, 1.0])], num_dispatched=9)
    return log


def test_the_same_weights_come_out_and_every_group_is_accounted_for(
    model_dir: Path, log: BatchLog, tmp_path: Path
) -> None:
    first, lineage = make_learner(model_dir), Lineage()
    train_again(first, lineage, log.read(1, 1), tuning())
    first.save_state(tmp_path / "checkpoint")
    saved, before = lineage.to_dict(), weights(first)
    for step in (2, 3):
        train_again(first, lineage, log.read(1, step), tuning())

    assert largest_difference(weights(first), before) > 0
    heir = make_learner(model_dir)
    heir.load_state(tmp_path / "checkpoint")
    recovered = Lineage.from_dict(saved)
    assert replay(heir, recovered, Position(1, 1), log, FORKS, tuning())[0] == Position(1, 3)
    assert largest_difference(weights(heir), weights(first)) == 0
    assert recovered == lineage
    assert (recovered.step, recovered.num_published, recovered.num_dropped) == (3, 4, 1)
    assert list(recovered.owed()) == [5, 6, 7, 8]


def test_the_age_that_was_logged_counts(model_dir: Path, tmp_path: Path) -> None:
    """Beyond the cap nothing is trained, also the second time."""
    young, old = BatchLog(JobDir(tmp_path / "young")), BatchLog(JobDir(tmp_path / "old"))
    logged(young, 1, 1, [group(0, [1.0, 0.0])])
    logged(old, 1, 1, [group(0, [1.0, 0.0])], staleness={"0": 100})
    moved = []
    for log in (young, old):
        learner = make_learner(model_dir)
        before = weights(learner)
        train_again(learner, Lineage(), log.read(1, 1), tuning())
        moved.append(largest_difference(weights(learner), before) > 0)
    assert moved == [True, False]


def test_the_log_of_a_dead_epoch_is_not_trained(model_dir: Path, log: BatchLog) -> None:
    """Epoch 2 forked off at step 1; what epoch 1 wrote after that never happened."""
    forks = {**FORKS, 2: Position(1, 1)}
    logged(log, 2, 2, [group(5, [1.0, 0.0])])
    lineage = Lineage()
    assert replay(make_learner(model_dir), lineage, Position(1, 0), log, forks, tuning())[0] == Position(2, 2)
    assert lineage.is_settled(5)
    assert not lineage.is_settled(3)
    assert not lineage.is_settled(4)


def test_a_damaged_log_ends_the_row_and_its_groups_are_owed_again(model_dir: Path, log: BatchLog) -> None:
    path = log.path(1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    lineage = Lineage()
    assert replay(make_learner(model_dir), lineage, Position(1, 0), log, FORKS, tuning())[0] == Position(1, 1)
    assert list(lineage.owed()) == [2, 3, 4, 5, 6, 7]


def test_a_step_with_an_erased_episode_ends_the_row_untouched(model_dir: Path, log: BatchLog) -> None:
    path, batch = log.path(1, 2), log.read(1, 2)
    key = batch.trajectories[0].key
    path.write_bytes(b"".join(without_texts(batch, [(key.group, key.member)])))
    lineage, learner = Lineage(), make_learner(model_dir)
    reached, problem = replay(learner, lineage, Position(1, 0), log, FORKS, tuning())
    assert (reached, list(lineage.owed())) == (Position(1, 1), [2, 3, 4, 5, 6, 7])
    assert problem is not None
    assert f"step 2 was trained on episodes that were erased since: {key.group}/{key.member}" in problem
    alone = make_learner(model_dir)
    train_again(alone, Lineage(), log.read(1, 1), tuning())
    assert largest_difference(weights(learner), weights(alone)) == 0
