"""The reward of a stopped episode: the environment's score, turn rewards, and the penalty for its length."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_core.episode_limits import settled_reward
from gspo_core.types import Split, StopReason, TurnReward
from services.workers.setting import EpisodeSpec


def without_asking(order: EpisodeSpec, stop: StopReason) -> float | None:
    """The reward, if it does not depend on the environment's score; otherwise None."""
    return settled_reward(stop, on_truncation=order.limits.on_truncation, broken_reward=order.broken_reward)


def in_order(by_turn: Mapping[int, float]) -> tuple[TurnReward, ...]:
    """What turns were paid, as the last segment names it."""
    return tuple(TurnReward(turn, reward) for turn, reward in sorted(by_turn.items()))


def with_length(
    order: EpisodeSpec, reward: float, parts: dict[str, float], num_sampled: int
) -> tuple[float, dict[str, float]]:
    """``reward`` and its parts, less the cost of the last tokens before the limit."""
    cost = cost_of_length(order, num_sampled)
    return (reward - cost, {**parts, "overlong": -cost}) if cost else (reward, parts)


def cost_of_length(order: EpisodeSpec, num_sampled: int) -> float:
    limits = order.limits
    if limits.overlong_tokens is None or order.lease.split is not Split.TRAIN:
        return 0.0
    over = num_sampled - (limits.max_episode_tokens - limits.overlong_tokens)
    return min(1.0, max(0.0, over / limits.overlong_tokens))
