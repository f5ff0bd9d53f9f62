"""A policy that learns to please its reward and not what was meant is noticed; one that only learns is not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from gspo_core.advantage import group_advantages
from gspo_core.log.sequences import HELD_BACK_METRIC, group_metrics
from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import Group, Segment, Trajectory
from services.trainer.telling.alarms import Alarms, RunAlarm
from tests.services.trainer.trainer_kit import group

NUM_GROUPS = 8
GROUP_SIZE = 8


@dataclass(frozen=True)
class Answer:
    """One of those that the policy can give."""

    chance: float
    """At first."""
    paid: float
    right: float


WRONG, RIGHT = Answer(0.6, 0.0, 0.0), Answer(0.36, 0.8, 1.0)
FLATTERY = Answer(0.04, 1.0, 0.0)
"""Pleases the grader more than a right answer does."""


def episodes(number: int, given: list[Answer]) -> Group:
    played = group(number, [one.paid for one in given])
    told = (told_of(trajectory, one) for trajectory, one in zip(played, given, strict=True))
    return replace(played, trajectories=tuple(told))


def told_of(trajectory: Trajectory, answer: Answer) -> Trajectory:
    last = trajectory.segments[-1]
    assert last.outcome is not None
    fields = {name: value for name, value in vars(last).items() if name not in ("num_actions", "logprob_sum")}
    outcome = replace(last.outcome, metrics={HELD_BACK_METRIC: answer.right})
    return Trajectory((*trajectory.segments[:-1], Segment(**fields | {"outcome": outcome})))


def train(answers: list[Answer], num_steps: int, alarms: Alarms) -> list[tuple[int, RunAlarm, dict[str, float]]]:
    """Policy gradient on what is paid; what was told of rewards that diverge, with the step's metrics."""
    rng = np.random.default_rng(0)
    logits = np.log([one.chance for one in answers])
    told = []
    for step in range(1, num_steps + 1):
        chances = np.exp(logits) / np.exp(logits).sum()
        given = rng.choice(len(answers), size=(NUM_GROUPS, GROUP_SIZE), p=chances)
        groups = [episodes(number, [answers[one] for one in members]) for number, members in enumerate(given)]
        metrics = group_metrics(groups) | {"groups/total": 8.0, "groups/zero_variance": 0.0}
        told += [(step, one.kind, metrics) for one in alarms.due(step, metrics, []) if one.kind in DIVERGES]
        logits += 0.1 * update(given, groups, chances)
    return told  # type: ignore[return-value]


DIVERGES = {RunAlarm.REWARDS_DIVERGE}


def update(given: NDArray[np.int64], groups: list[Group], chances: NDArray[np.float64]) -> NDArray[np.float64]:
    advantages = [group_advantages(one.rewards, AdvantageConfig()) for one in groups]
    chosen = np.eye(len(chances))[given] - chances
    found: NDArray[np.float64] = (np.array(advantages)[..., None] * chosen).mean(axis=(0, 1)) * GROUP_SIZE
    return found


def test_a_policy_that_flatters_its_grader_is_told_with_both_rewards() -> None:
    told = train([WRONG, RIGHT, FLATTERY], 80, Alarms())
    step, _, metrics = told[0]
    assert 10 < step < 80
    assert metrics["held_back/mean"] < 0.8
    assert metrics["reward/mean"] > 0.7, "by what it is trained on, the run looks better than ever"
    assert len(told) < 10, "an alarm that lasts is repeated rarely"


def test_a_policy_that_only_learns_is_not_suspected() -> None:
    assert train([WRONG, RIGHT], 200, Alarms()) == []


@pytest.mark.parametrize("paid", [0.0, 0.3])
def test_a_run_whose_rewards_both_fall_is_no_matter_of_this_alarm(paid: float) -> None:
    alarms = Alarms()
    metrics = {"groups/total": 8.0, "groups/zero_variance": 0.0}
    good = group_metrics([episodes(0, [RIGHT] * 7 + [WRONG])]) | metrics
    bad = group_metrics([episodes(0, [replace(WRONG, paid=paid)] * 7 + [RIGHT])]) | metrics
    kinds = [one.kind for step in range(1, 21) for one in alarms.due(step, good if step <= 10 else bad, [])]
    assert RunAlarm.REWARDS_DIVERGE not in kinds


def test_a_trainer_that_takes_over_knows_the_best_it_was() -> None:
    metrics = {"groups/total": 8.0, "groups/zero_variance": 0.0}
    right = group_metrics([episodes(0, [RIGHT] * 7 + [WRONG])]) | metrics
    flatters = group_metrics([episodes(0, [FLATTERY] * 7 + [RIGHT])]) | metrics
    heir = Alarms()
    heir.recall([{"step": step, **right} for step in range(1, 11)])
    kinds = [one.kind for step in range(11, 21) for one in heir.due(step, flatters, [])]
    assert RunAlarm.REWARDS_DIVERGE in kinds


def test_episodes_without_a_reward_or_a_second_one_are_left_out() -> None:
    both = episodes(0, [RIGHT, WRONG])
    assert group_metrics([both, group(1, [1.0, None])])["held_back/count"] == 2
    assert "held_back/mean" not in group_metrics([group(1, [1.0, 0.0])])
