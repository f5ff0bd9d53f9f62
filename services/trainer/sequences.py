"""From groups to training sequences, and what a person wants to know of the groups: pure functions.

Failed episodes and ragged groups are data: an episode without a reward is left out of the baseline and of the batch,
never treated as reward 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gspo_core.advantage import group_advantages
from gspo_core.batch import TrainSequence
from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import Branch, Group, Trajectory

# The staleness in steps of tokens, given their versions.
StalenessOf = Callable[[NDArray[np.int32]], NDArray[np.int32]]


def train_sequences(
    groups: Sequence[Group], staleness_of: StalenessOf, advantage: AdvantageConfig
) -> list[TrainSequence]:
    """One per branch of every episode that has a reward; branches of an episode share a weight of 1."""
    sequences: list[TrainSequence] = []
    for group in groups:
        for trajectory, value in zip(group, group_advantages(group.rewards, advantage), strict=True):
            if trajectory.reward is not None:
                sequences += _episode_sequences(trajectory, value, staleness_of)
    return sequences


def _episode_sequences(trajectory: Trajectory, advantage: float, staleness_of: StalenessOf) -> list[TrainSequence]:
    branches = trajectory.branches
    return [_branch_sequence(branch, advantage, 1 / len(branches), staleness_of) for branch in branches]


def _branch_sequence(branch: Branch, advantage: float, weight: float, staleness_of: StalenessOf) -> TrainSequence:
    return TrainSequence(
        token_ids=branch.token_ids,
        action_mask=branch.action_mask,
        behavior_logprobs=branch.behavior_logprobs,
        turn_ids=branch.turn_ids,
        staleness=staleness_of(branch.versions),
        advantages=advantage,
        weight=weight,
        temperature=branch.segments[0].temperature,
    )


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths, stop reasons, and how many episodes went on under new weights."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = np.array([t.reward for t in trajectories if t.reward is not None])
    stops = Counter(t.outcome.stop_reason.value for t in trajectories)
    spread = [set(group.rewards) - {None} for group in groups]
    metrics = {
        "episodes/count": len(trajectories),
        "episodes/mixed_versions_share": _mean([len(t.versions) > 1 for t in trajectories]),
        "episodes/turns_mean": _mean([t.num_turns for t in trajectories]),
        "episodes/actions_mean": _mean([t.num_actions for t in trajectories]),
        "groups/complete": sum(len(group.trajectories) == group.size for group in groups),
        "groups/zero_variance": sum(len(rewards) <= 1 for rewards in spread),
    }
    if rewards.size:
        metrics |= {
            "reward/mean": rewards.mean(),
            "reward/std": rewards.std(),
            "reward/min": rewards.min(),
            "reward/max": rewards.max(),
        }
    metrics |= {f"stop/{reason}": count for reason, count in stops.items()}
    return {name: float(value) for name, value in metrics.items()}


def staleness_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    ages = [sequence.staleness[sequence.action_mask] for sequence in sequences]
    tokens = np.concatenate(ages) if ages else np.zeros(0)
    return {
        "tokens/trained": float(tokens.size),
        "staleness/mean": float(tokens.mean()) if tokens.size else 0.0,
        "staleness/max": float(tokens.max()) if tokens.size else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
