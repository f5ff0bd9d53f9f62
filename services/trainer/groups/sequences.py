"""Turns groups into training sequences and computes their metrics: pure functions.

Rule: failed episodes and ragged groups are normal input. An episode without a reward stays out of the baseline and the
batch; it never counts as reward 0. An episode has a single advantage, as sequence-level losses require, unless the job
uses turn rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.advantage import advantages_of, branch_weights, token_advantages, turn_advantages
from gspo_core.batch import TrainSequence
from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import EpisodeKey, Group, Trajectory

# Maps the versions of tokens to their staleness in steps.
StalenessOf = Callable[[NDArray[np.int32]], NDArray[np.int32]]


@dataclass(frozen=True)
class TrainBatch:
    """The training input of one step."""

    sequences: list[TrainSequence]
    """One per branch of each episode."""
    episodes: list[Trajectory]
    """The episodes in the batch, in the same order as ``sequences``."""
    metrics: dict[str, float]
    """Number of groups of each kind."""

    def by_episode(self, values: Sequence[NDArray[np.float32]]) -> dict[EpisodeKey, NDArray[np.float32]]:
        """Regroup ``values`` of the sampled tokens, one array per sequence, by episode."""
        rest, nothing = iter(values), np.zeros(0, np.float32)
        return {one.key: np.concatenate([nothing, *(next(rest) for _ in one.branches)]) for one in self.episodes}


def train_batch(groups: Sequence[Group], staleness_of: StalenessOf, config: AdvantageConfig) -> TrainBatch:
    """Build the sequences of every rewarded episode in a kept group."""
    trajectories = [trajectory for group in groups for trajectory in group]
    batch = advantages_of(groups, config)
    by_turn = _advantages_by_turn(groups, config) if config.turn_reward_weight else None
    sequences: list[TrainSequence] = []
    for place, trajectory in enumerate(trajectories):
        if batch.kept[place]:
            advantages = by_turn[place] if by_turn else batch.advantages[place]
            sequences += _episode_sequences(trajectory, advantages, staleness_of)
    episodes = [one for one, is_kept in zip(trajectories, batch.kept, strict=True) if is_kept]
    return TrainBatch(sequences, episodes, batch.metrics())


def _advantages_by_turn(groups: Sequence[Group], config: AdvantageConfig) -> list[list[float]]:
    """Return one list of turn advantages per episode, in batch order."""
    return [
        advantages
        for group in groups
        for advantages in turn_advantages(group.rewards, [_turn_rewards(one) for one in group], config)
    ]


def _turn_rewards(trajectory: Trajectory) -> list[float | None]:
    rewards: list[float | None] = [None] * trajectory.num_turns
    for segment in trajectory.segments:
        if segment.turn_reward is not None:
            rewards[segment.turn] = (rewards[segment.turn] or 0.0) + segment.turn_reward
    return rewards


def _episode_sequences(
    trajectory: Trajectory, advantages: float | Sequence[float], staleness_of: StalenessOf
) -> list[TrainSequence]:
    """``advantages`` is one value for the episode, or one per turn."""
    branches = trajectory.branches
    weights = branch_weights([branch.num_actions for branch in branches]) if branches else []
    return [
        TrainSequence(
            token_ids=branch.token_ids,
            action_mask=branch.action_mask,
            behavior_logprobs=branch.behavior_logprobs,
            turn_ids=branch.turn_ids,
            staleness=staleness_of(branch.versions),
            advantages=advantages
            if isinstance(advantages, float)
            else token_advantages(advantages, branch.turn_ids, branch.action_mask),
            weight=weight,
            temperature=branch.segments[0].temperature,
        )
        for branch, weight in zip(branches, weights, strict=True)
    ]


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Summarise rewards, lengths, stop reasons, and the share of episodes that span several versions."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = np.array([t.reward for t in trajectories if t.reward is not None])
    stops = Counter(t.outcome.stop_reason.value for t in trajectories)
    metrics = {
        "episodes/count": len(trajectories),
        "episodes/mixed_versions_share": _mean([len(t.versions) > 1 for t in trajectories]),
        "episodes/turns_mean": _mean([t.num_turns for t in trajectories]),
        "episodes/actions_mean": _mean([t.num_actions for t in trajectories]),
        "sampling/entropy": _entropy(trajectories),
    }
    if rewards.size:
        metrics |= {
            "reward/mean": rewards.mean(),
            "reward/std": rewards.std(),
            "reward/min": rewards.min(),
            "reward/max": rewards.max(),
        }
    metrics |= {f"stop/{reason}": count for reason, count in stops.items()}
    metrics |= _times(trajectories)
    return {name: float(value) for name, value in metrics.items()}


def _times(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Average the time split of an episode, over the episodes that report one."""
    told = [one.outcome.metrics for one in trajectories if "model_s" in one.outcome.metrics]
    named = {"engine": "model_s", "env": "env_s", "queue": "queue_s"}
    return {f"time/episode_{to}_s": _mean([one.get(name, 0.0) for one in told]) for to, name in named.items() if told}


def staleness_metrics(sequences: Sequence[TrainSequence], cap: int) -> dict[str, float]:
    """Summarise the staleness of all sampled tokens; tokens beyond ``cap`` are not trained."""
    ages = [sequence.staleness[sequence.action_mask] for sequence in sequences]
    tokens = np.concatenate(ages) if ages else np.zeros(0)
    return {
        "tokens/trained": float((tokens <= cap).sum()),
        "staleness/mean": float(tokens.mean()) if tokens.size else 0.0,
        "staleness/max": float(tokens.max()) if tokens.size else 0.0,
        "staleness/beyond_cap_frac": float((tokens > cap).mean()) if tokens.size else 0.0,
    }


def _entropy(trajectories: Sequence[Trajectory]) -> float:
    """Estimate the mean entropy of the sampling distribution from the sampled tokens."""
    drawn = [one.behavior_logprobs[one.action_mask] for episode in trajectories for one in episode.segments]
    values = np.concatenate(drawn) if drawn else np.zeros(0)
    return -float(values.mean(dtype=np.float64)) if values.size else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
