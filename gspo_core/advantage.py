"""Turns the rewards of a group into advantages of its members.

One rule: the group id defines a group, never adjacency; a member without a reward (an infrastructure failure) is
neither in the baseline nor trained, and never counts as reward 0.

It computes in float64 up to the returned arrays. It only marks the groups that dynamic sampling drops; the trainer
drops them. It imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gspo_core.objective_config import AdvantageConfig
from gspo_core.types import EpisodeKey, Group, Trajectory

Floats = NDArray[np.float64]
Turns: TypeAlias = Sequence[Sequence[float | None]]
"""For each member the rewards of its turns; None for a turn without one."""
Situations: TypeAlias = Sequence[Sequence[Hashable]]
"""For each member what its turns are compared by: turns of a group with an equal one are compared."""


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
    by_turn: list[list[float]] | None = None
    """With `turn_reward_weight`: the advantages of each member's turns, in the same order."""

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


def judged(group: Group, config: AdvantageConfig) -> GroupVerdict:
    """Judge a finished group; the trainer calls this before forming a batch."""
    return judge_group(group.rewards, config, _turns_of(group, config))


def judge_group(
    rewards: Sequence[float | None], config: AdvantageConfig, turn_rewards: Turns | None = None
) -> GroupVerdict:
    """Judge whether a group contributes to training. One with equal rewards does, if rewards of its turns differ."""
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
        dropped=zero_variance and config.zero_variance == "drop" and not _turns_differ(rewards, config, turn_rewards),
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
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    config: AdvantageConfig,
    turn_rewards: Turns | None = None,
    situations: Situations | None = None,
) -> BatchAdvantages:
    """The advantages of all members of a batch, in any order and with groups of any remaining size.

    ``turn_rewards`` and ``situations`` act with `turn_reward_weight` only.
    """
    if len(rewards) != len(group_ids):
        raise AdvantageError(f"{len(rewards)} rewards but {len(group_ids)} group ids")
    turns = turn_rewards if config.turn_reward_weight else None
    members: dict[Hashable, list[int]] = {}
    for position, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(position)
    by_group = {group_id: [rewards[position] for position in positions] for group_id, positions in members.items()}
    of_turns = {group_id: _at(turns, positions) for group_id, positions in members.items()}
    verdicts = {group_id: judge_group(group, config, of_turns[group_id]) for group_id, group in by_group.items()}
    divisor = _batch_divisor(list(by_group.values()), verdicts, config)
    advantages = np.zeros(len(rewards))
    for group_id, group in by_group.items():
        values = group_advantages(group, config) if divisor is None else _centered(group, config) / divisor
        advantages[members[group_id]] = values
    kept = [
        reward is not None and not verdicts[group_id].dropped
        for reward, group_id in zip(rewards, group_ids, strict=True)
    ]
    by_turn = None if turns is None else _by_turn(members, by_group, turns, situations, config)
    return BatchAdvantages([float(value) for value in advantages], kept, verdicts, by_turn)


def advantages_of(groups: Sequence[Group], config: AdvantageConfig) -> BatchAdvantages:
    """The advantages of all episodes of `groups`, in order."""
    episodes = [trajectory for group in groups for trajectory in group]
    turns = _turns_of(episodes, config)
    rewards = [value for group in groups for value in _compared(group, config)]
    by_what = config.turn_reward_weight and config.turn_groups == "observation"
    situations = [observations(one) for one in episodes] if by_what else None
    return batch_advantages(rewards, [one.key.group for one in episodes], config, turns, situations)


def episode_advantages(groups: Sequence[Group], config: AdvantageConfig) -> dict[EpisodeKey, float | None]:
    """The advantage of each episode; None for episodes outside the batch."""
    found, episodes = advantages_of(groups, config), (trajectory for group in groups for trajectory in group)
    rows = zip(episodes, found.advantages, found.kept, strict=True)
    return {one.key: advantage if is_kept else None for one, advantage, is_kept in rows}


def part_rewards(parts: Sequence[Mapping[str, float] | None], config: AdvantageConfig) -> list[float | None]:
    """For each member of a group the weighted sum of the advantages of its reward's parts, each compared by itself
    (GDPO, 2601.05242); None for members without a reward. The baseline acts on the sum alone: `leave_one_out` is a
    factor, which would count once more for each part."""
    each = config.model_copy(update={"scale": "group_std", "baseline": "mean", "part_weights": None})
    total = np.zeros(len(parts))
    for name, weight in (config.part_weights or {}).items():
        values = [None if member is None else member.get(name, 0.0) for member in parts]
        total += weight * np.array(group_advantages(values, each))
    return [None if member is None else float(value) for member, value in zip(parts, total, strict=True)]


def turn_advantages(
    rewards: Sequence[float | None], turn_rewards: Turns, config: AdvantageConfig, situations: Situations | None = None
) -> list[list[float]]:
    """For each member of a group, an advantage for each of its turns.

    It is the episode's advantage plus `turn_reward_weight` times that of the discounted turn rewards from this turn on,
    compared with the members that reached the same turn, or with all turns of the group in the same situation. A turn
    without its own reward counts as 0.
    """
    if len(rewards) != len(turn_rewards):
        raise AdvantageError(f"{len(rewards)} rewards but the turns of {len(turn_rewards)} members")
    episode = group_advantages(rewards, config)
    returns = [_returns(turns, config.turn_discount) for turns in turn_rewards]
    advantages = [[value] * len(turns) for value, turns in zip(episode, turn_rewards, strict=True)]
    alike: dict[Hashable, list[tuple[int, int]]] = {}
    for member, turns in enumerate(turn_rewards):
        for turn in range(len(turns)):
            alike.setdefault(turn if situations is None else situations[member][turn], []).append((member, turn))
    for places in alike.values():
        compared = [None if rewards[member] is None else returns[member][turn] for member, turn in places]
        for (member, turn), value in zip(places, group_advantages(compared, config), strict=True):
            advantages[member][turn] += config.turn_reward_weight * value
    return advantages


def observations(episode: Trajectory) -> list[bytes]:
    """For each turn the tokens that it read before its first sampled one: equal ones are the same situation."""
    found = [b""] * episode.num_turns
    begun: set[int] = set()
    for segment in episode.segments:
        if segment.turn in begun or not segment.num_tokens:
            continue
        sampled = np.flatnonzero(segment.action_mask)
        end = int(sampled[0]) if len(sampled) else segment.num_tokens
        found[segment.turn] += np.ascontiguousarray(segment.token_ids[:end], np.int32).tobytes()
        begun |= {segment.turn} if len(sampled) else set()
    return found


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


def _compared(group: Group, config: AdvantageConfig) -> Sequence[float | None]:
    """What the members of a group are compared by."""
    if config.part_weights is None:
        return group.rewards
    return part_rewards([None if one.reward is None else one.outcome.reward_parts for one in group], config)


def _turns_of(episodes: Iterable[Trajectory], config: AdvantageConfig) -> Turns | None:
    return [one.turn_rewards for one in episodes] if config.turn_reward_weight else None


def _at(turns: Turns | None, positions: Sequence[int]) -> Turns | None:
    return None if turns is None else [turns[position] for position in positions]


def _by_turn(
    members: Mapping[Hashable, Sequence[int]],
    rewards: Mapping[Hashable, Sequence[float | None]],
    turns: Turns,
    situations: Situations | None,
    config: AdvantageConfig,
) -> list[list[float]]:
    found: list[list[float]] = [[] for _ in turns]
    for group_id, positions in members.items():
        own = None if situations is None else [situations[position] for position in positions]
        values = turn_advantages(rewards[group_id], [turns[position] for position in positions], config, own)
        for position, value in zip(positions, values, strict=True):
            found[position] = value
    return found


def _turns_differ(rewards: Sequence[float | None], config: AdvantageConfig, turns: Turns | None) -> bool:
    """Whether rewards of turns make a difference where those of the episodes make none."""
    if turns is None or not config.turn_reward_weight:
        return False
    return any(any(values) for values in turn_advantages(rewards, turns, config))


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
