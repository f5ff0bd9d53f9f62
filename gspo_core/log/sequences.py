"""Turns groups into training sequences and computes their metrics: pure functions.

Rule: failed episodes and ragged groups are normal input. An episode without a reward stays out of the baseline and the
batch; it never counts as reward 0. An episode has a single advantage, as sequence-level losses require, unless the job
uses turn rewards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.advantage import advantages_of, branch_weights, token_advantages
from gspo_core.batch import TrainSequence
from gspo_core.log.branches import drift
from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import EpisodeKey, Group, Trajectory

# Maps the versions of tokens to their staleness in steps.
StalenessOf = Callable[[NDArray[np.int32]], NDArray[np.int32]]

HELD_BACK_METRIC = "held_back_reward"
"""What an environment reports of an episode, and nothing trains: a second opinion on what the reward is for."""
HELD_BACK = "held_back"
"""Where steps and evaluations report it."""
PARTS = "parts/"
"""What the metrics that tell how many episodes report a part of the reward begin with."""
MAX_OTHER_PARTS = 16


@dataclass(frozen=True)
class TrainBatch:
    """The training input of one step."""

    sequences: list[TrainSequence]
    """One per branch of each episode."""
    episodes: list[Trajectory]
    """The episodes in the batch, in the same order as ``sequences``."""
    metrics: dict[str, float]
    """Number of groups of each kind, and which parts of the reward there were."""

    def by_episode(self, values: Sequence[NDArray[np.float32]]) -> dict[EpisodeKey, NDArray[np.float32]]:
        """Regroup ``values`` of the sampled tokens, one array per sequence, by episode."""
        rest, nothing = iter(values), np.zeros(0, np.float32)
        return {one.key: np.concatenate([nothing, *(next(rest) for _ in one.branches)]) for one in self.episodes}


def train_batch(
    groups: Sequence[Group],
    staleness_of: StalenessOf,
    config: AdvantageConfig,
    any_age: Collection[int] = (),
    cap: int = 0,
    *,
    keep_groups: bool = False,
) -> TrainBatch:
    """Build the sequences of every rewarded episode in a kept group.

    In groups of ``any_age`` tokens count as no older than ``cap``, beyond which they would be withheld. With
    ``keep_groups`` an update gets whole groups.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    batch = advantages_of(groups, config)
    sequences: list[TrainSequence] = []
    for place, trajectory in enumerate(trajectories):
        if batch.kept[place]:
            advantages = batch.by_turn[place] if batch.by_turn else batch.advantages[place]
            is_exempt = trajectory.key.group in any_age
            ages = _at_most(staleness_of, cap, is_on=is_exempt)
            sequences += _episode_sequences(trajectory, advantages, ages, keep_groups=keep_groups)
    episodes = [one for one, is_kept in zip(trajectories, batch.kept, strict=True) if is_kept]
    return TrainBatch(sequences, episodes, batch.metrics() | reported_parts(trajectories, config))


def reported_parts(episodes: Sequence[Trajectory], config: AdvantageConfig) -> dict[str, float]:
    """With `part_weights`, for each part of the reward the share of episodes that report it: of those with a weight,
    and of the others that most report."""
    rewarded = [one.outcome.reward_parts for one in episodes if one.reward is not None]
    if not config.part_weights or not rewarded:
        return {}
    weighted = [name for name, weight in config.part_weights.items() if weight]
    counts = Counter(name for parts in rewarded for name in parts)
    others = sorted(counts.keys() - set(weighted), key=lambda name: (-counts[name], name))
    names = [*weighted, *others[:MAX_OTHER_PARTS]]
    return {f"{PARTS}{name}": counts[name] / len(rewarded) for name in names}


def _at_most(staleness_of: StalenessOf, cap: int, *, is_on: bool) -> StalenessOf:
    return (lambda versions: np.minimum(staleness_of(versions), np.int32(cap))) if is_on else staleness_of


def _episode_sequences(
    trajectory: Trajectory, advantages: float | Sequence[float], staleness_of: StalenessOf, *, keep_groups: bool
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
            group=trajectory.key.group if keep_groups else None,
        )
        for branch, weight in zip(branches, weights, strict=True)
    ]


def data_metrics(batch: TrainBatch, groups: Sequence[Group], cap: int) -> dict[str, float]:
    """All that a step reports of what it is trained on, which its log holds."""
    return batch.metrics | group_metrics(groups) | staleness_metrics(batch.sequences, cap)


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
    metrics |= _lost(groups)
    if rewards.size:
        metrics |= {
            "reward/mean": rewards.mean(),
            "reward/std": rewards.std(),
            "reward/min": rewards.min(),
            "reward/max": rewards.max(),
        }
    metrics |= {f"stop/{reason}": count for reason, count in stops.items()}
    metrics |= _times(trajectories) | _held_back(trajectories) | _drift(trajectories) | _refused(trajectories)
    return {name: float(value) for name, value in metrics.items()}


def _lost(groups: Sequence[Group]) -> dict[str, float]:
    """Episodes that were played and lost. If a whole class of them is always lost, such as all that call one tool, it
    is never trained, and the reward does not show it."""
    episodes = [episode for group in groups for episode in group]
    lost = [episode for episode in episodes if episode.reward is None]
    found = {
        "episodes/lost_share": _mean([episode.reward is None for episode in episodes]),
        "episodes/lost_share_worst_group": max(
            (_mean([one.reward is None for one in group]) for group in groups), default=0.0
        ),
        "episodes/again_share": _mean([episode.attempt > 0 for episode in episodes]),
    }
    if lost:
        found["episodes/lost_turns_mean"] = _mean([episode.num_turns for episode in lost])
    return found


def _drift(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """For agents' episodes: branches by the reason why they began, and the tokens read anew for them."""
    reasons, num_anew = Counter[str](), 0
    for trajectory in trajectories:
        found, num = drift(trajectory.segments)
        reasons += found
        num_anew += num
    told = {f"branches/{reason}": float(count) for reason, count in reasons.items()}
    return told | {"branches/tokens_read_anew": float(num_anew)} if told else {}


def _refused(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Posted rewards that were refused: not allowed for that job, or out of range."""
    num_refused = sum(one.outcome.metrics.get("rewards_refused", 0.0) for one in trajectories)
    return {"rewards/refused": num_refused} if num_refused else {}


def _held_back(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Summarise the second reward of the episodes that have both."""
    told = [one.outcome.metrics for one in trajectories if one.reward is not None]
    values = np.array([metrics[HELD_BACK_METRIC] for metrics in told if HELD_BACK_METRIC in metrics])
    if not values.size:
        return {}
    return {f"{HELD_BACK}/mean": values.mean(), f"{HELD_BACK}/std": values.std(), f"{HELD_BACK}/count": values.size}


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
