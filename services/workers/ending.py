"""The end of an episode, whoever drove it: what it is paid without asking, what its length costs, how it is told.

Rule: what the order says of the reward is only worked out here; nothing is made up for an environment that fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gspo_core.environment_contract import EnvironmentFailed
from gspo_core.episode_limits import settled_reward
from gspo_core.invariants import InvalidValue
from gspo_core.types import Evidence, Outcome, Split, StopReason, TurnReward
from services.episodes.metering import Timings
from services.episodes.tree import TokenTree
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


def outcome_of(
    stop: StopReason, reward: float, parts: Mapping[str, float], metrics: Mapping[str, float], evidence: Evidence
) -> Outcome:
    """Raises ``EnvironmentFailed`` where what the environment says is no number."""
    try:
        return Outcome(stop, reward, parts, metrics, evidence)
    except InvalidValue as error:
        raise EnvironmentFailed("score", str(error)) from error


def measures(tree: TokenTree, timings: Timings, of_author: Mapping[str, float], **counted: float) -> dict[str, float]:
    """What is told of an episode in numbers: the author's, then what its driver counted, then tokens and times."""
    finite = {name: value for name, value in of_author.items() if math.isfinite(value)}
    return (
        finite
        | counted
        | {
            "tokens_sampled": tree.num_sampled,
            "versions": len(tree.versions),
            "model_s": timings.engine_s,
            "env_s": timings.env_s,
            "queue_s": timings.queue_s,
        }
    )
