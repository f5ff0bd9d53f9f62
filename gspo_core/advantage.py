"""Turns the rewards of a group into advantages of its members.

One rule: the group id defines a group, never adjacency; a member without a reward (an infrastructure failure) is
neither in the baseline nor trained, and never counts as reward 0.

It computes in float64 up to the returned arrays. It only marks the groups that dynamic sampling drops; the trainer
drops them. It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import EpisodeKey, Group

Floats = NDArray[np.float64]


class AdvantageError(ValueError):
    """The rewards do not fit their group or the configuration."""


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """Whether a group can contribute to training, and why not."""

    num_members: int
    num_rewards: int
    zero_variance: bool
    """At least two rewards, all equal."""
    too_small: bool
    """Fewer rewards than `min_group_size`."""
    tiny_spread: bool
    """A standard deviation below `min_std`."""
    dropped: bool
    """Dynamic sampling removes it from the batch."""

    @property
    def ragged(self) -> bool:
        """Some members have no reward."""
        return self.num_rewards < self.num_members


@dataclass(frozen=True, slots=True)
class BatchAdvantages:
    """One entry per member, in the order given; `verdicts` by group id."""

    advantages: list[float]
    """0 for members without a reward, a comparison or a learning signal."""
    kept: list[bool]
    """False for members outside the batch: those without a reward and those of dropped groups."""
    verdicts: dict[Hashable, GroupVerdict]

    def metrics(self) -> dict[str, float]:
        """Counts of groups by verdict."""
        verdicts = list(self.verdicts.values())
        return {
            "groups/total": float(len(verdicts)),
            "groups/zero_variance": float(sum(verdict.zero_variance for verdict in verdicts)),
            "groups/too_small": float(sum(verdict.too_small for verdict in verdicts)),
            "groups/complete": float(sum(not verdict.ragged for verdict in verdicts)),
            "groups/partial": float(sum(verdict.ragged for verdict in verdicts)),
            "groups/tiny_spread": float(sum(verdict.tiny_spread for verdict in verdicts)),
            "groups/dropped_zero_variance": float(sum(verdict.dropped for verdict in verdicts)),
        }


def judge_group(rewards: Sequence[float | None], config: AdvantageConfig) -> GroupVerdict:
    """Judge whether a group contributes to training; the trainer calls this before forming a batch."""
    known = _known(rewards)
    # Use raw rewards: deviations from a floating-point mean leave signed residues of 1e-17.
    zero_variance = len(known) > 1 and float(known.max()) == float(known.min())
    too_small = len(known) < config.min_group_size
    compared = not (zero_variance or too_small)
    return GroupVerdict(
        num_members=len(rewards),
        num_rewards=len(known),
        zero_variance=zero_variance,
        too_small=too_small,
        tiny_spread=compared and config.scale != "none" and _std(known, config) < config.min_std,
        dropped=zero_variance and config.zero_variance == "drop",
    )


def group_advantages(rewards: Sequence[float | None], config: AdvantageConfig) -> list[float]:
    """The advantages of one group's members, 0 for those without a reward (None)."""
    if config.scale in ("batch_std", "batch_centered_std"):
        raise AdvantageError(f"scale: {config.scale} looks at a whole batch; use batch_advantages")
    centered = _centered(rewards, config)
    if config.scale == "group_std" and centered.any():
        centered = centered / _divisor(_std(_known(rewards), config), config)
    return [float(value) for value in centered]


def batch_advantages(
    rewards: Sequence[float | None], group_ids: Sequence[Hashable], config: AdvantageConfig
) -> BatchAdvantages:
    """The advantages of all members of a batch, in any order and with groups of any remaining size."""
    if len(rewards) != len(group_ids):
        raise AdvantageError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    members: dict[Hashable, list[int]] = {}
    for position, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(position)
    by_group = {group_id: [rewards[position] for position in positions] for group_id, positions in members.items()}
    verdicts = {group_id: judge_group(group, config) for group_id, group in by_group.items()}
    divisor = _batch_divisor(list(by_group.values()), verdicts, config)
    advantages = np.zeros(len(rewards))
    for group_id, group in by_group.items():
        values = group_advantages(group, config) if divisor is None else _centered(group, config) / divisor
        advantages[members[group_id]] = values
    kept = [
        reward is not None and not verdicts[group_id].dropped
        for reward, group_id in zip(rewards, group_ids, strict=True)
    ]
    return BatchAdvantages([float(value) for value in advantages], kept, verdicts)


def advantages_of(groups: Sequence[Group], config: AdvantageConfig) -> BatchAdvantages:
    """The advantages of all episodes of `groups`, in order."""
    episodes = [trajectory for group in groups for trajectory in group]
    return batch_advantages([one.reward for one in episodes], [one.key.group for one in episodes], config)


def episode_advantages(groups: Sequence[Group], config: AdvantageConfig) -> dict[EpisodeKey, float | None]:
    """The advantage of each episode; None for episodes outside the batch."""
    found, episodes = advantages_of(groups, config), (trajectory for group in groups for trajectory in group)
    rows = zip(episodes, found.advantages, found.kept, strict=True)
    return {one.key: advantage if is_kept else None for one, advantage, is_kept in rows}


def turn_advantages(
    rewards: Sequence[float | None], turn_rewards: Sequence[Sequence[float | None]], config: AdvantageConfig
) -> list[list[float]]:
    """For each member of a group, an advantage for each of its turns.

    It is the episode's advantage plus `turn_reward_weight` times that of the discounted turn rewards from this turn on,
    compared with the members that reached the same turn. A turn without its own reward counts as 0.
    """
    if len(rewards) != len(turn_rewards):
        raise AdvantageError(f"{len(rewards)} rewards but the turns of {len(turn_rewards)} members")
    episode = group_advantages(rewards, config)
    returns = [_returns(turns, config.turn_discount) for turns in turn_rewards]
    advantages = [[value] * len(turns) for value, turns in zip(episode, turn_rewards, strict=True)]
    for turn in range(max((len(turns) for turns in turn_rewards), default=0)):
        reached = [member for member, turns in enumerate(turn_rewards) if len(turns) > turn]
        compared = [None if rewards[member] is None else returns[member][turn] for member in reached]
        for member, value in zip(reached, group_advantages(compared, config), strict=True):
            advantages[member][turn] += config.turn_reward_weight * value
    return advantages


def token_advantages(
    turn_advantages: Sequence[float], turn_ids: NDArray[np.int32], action_mask: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Give each trained token the advantage of its turn, and all others 0."""
    table = np.asarray(turn_advantages, dtype=np.float64)
    trained = np.asarray(action_mask, dtype=bool)
    turns = np.asarray(turn_ids)[trained]
    if turns.size and (int(turns.min()) < 0 or int(turns.max()) >= len(table)):
        raise AdvantageError(f"turns {int(turns.min())} to {int(turns.max())}, but advantages for {len(table)} turns")
    values = np.zeros(trained.shape, dtype=np.float32)
    values[trained] = table[turns]
    return values


def branch_weights(num_actions: Sequence[int]) -> list[float]:
    """The weights of an episode's branches, by their trained tokens; they sum to 1.

    Every token then counts as much as in an episode that was never rewritten: `aggregate: sequence` takes the mean
    over the tokens of a branch times its weight, the other aggregations use weights to count episodes only.
    """
    if not num_actions or min(num_actions) < 0:
        raise AdvantageError(
            f"an episode has at least one branch, of 0 or more trained tokens, not {list(num_actions)}"
        )
    total = sum(num_actions)
    if not total:
        return [1 / len(num_actions)] * len(num_actions)
    return [count / total for count in num_actions]


def _known(rewards: Sequence[float | None]) -> Floats:
    known = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not np.isfinite(known).all():
        raise AdvantageError(f"a reward is a finite number, or None for a member without one; got {list(rewards)}")
    return known


def _centered(rewards: Sequence[float | None], config: AdvantageConfig) -> Floats:
    """Rewards minus their baseline; exactly 0 without a comparison."""
    values = np.zeros(len(rewards))
    verdict = judge_group(rewards, config)
    if verdict.zero_variance or verdict.too_small:
        return values
    known = _known(rewards)
    differences = known - known.mean()
    if config.baseline == "leave_one_out":
        differences = differences * (len(known) / (len(known) - 1))
    values[[reward is not None for reward in rewards]] = differences
    return values


def _std(values: Floats, config: AdvantageConfig) -> float:
    return float(values.std(ddof=config.ddof)) if len(values) > config.ddof else 0.0


def _divisor(std: float, config: AdvantageConfig) -> float:
    return max(std, config.min_std) + config.eps


def _batch_divisor(
    groups: Sequence[Sequence[float | None]], verdicts: dict[Hashable, GroupVerdict], config: AdvantageConfig
) -> float | None:
    """The divisor shared by the batch's kept members; None if each group has its own or none."""
    if config.scale not in ("batch_std", "batch_centered_std"):
        return None
    kept = [group for group, verdict in zip(groups, verdicts.values(), strict=True) if not verdict.dropped]
    if config.scale == "batch_std":
        parts = [_known(group) for group in kept]
    else:
        parts = [_centered(group, config)[[reward is not None for reward in group]] for group in kept]
    everything = np.concatenate([np.zeros(0), *parts])
    return _divisor(_std(everything, config), config)


def _returns(turn_rewards: Sequence[float | None], discount: float) -> list[float]:
    """Discounted sum of the turn rewards from each turn on."""
    returns, following = [], 0.0
    for reward in reversed(turn_rewards):
        following = (reward or 0.0) + discount * following
        if not math.isfinite(following):
            raise AdvantageError(f"a turn reward is not a finite number: {list(turn_rewards)}")
        returns.append(following)
    return returns[::-1]
