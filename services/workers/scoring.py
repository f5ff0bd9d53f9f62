"""The reward of a stopped episode: the environment's score, turn rewards, and the penalty for its length.

Rule: an episode that the policy broke gets the reward for that, whatever its turns paid before; a truncated one is
scored or not, as the job says. No reward is made up for an environment that fails: that is an error.
"""

from __future__ import annotations

from gspo_core.types import Split, StopReason
from services.workers.setting import Order

TRUNCATED = frozenset(
    {
        StopReason.MAX_TURNS,
        StopReason.MAX_TOKENS,
        StopReason.MAX_TOOL_CALLS,
        StopReason.CONTEXT_OVERFLOW,
        StopReason.EPISODE_TIMEOUT,
        StopReason.REPETITION,
    }
)
PROVOKED = frozenset({StopReason.TOOL_TIMEOUT, StopReason.ENV_CRASH})
"""The policy's own action broke its session, so it cannot be scored. It is an outcome all the same, else crashing would
be an escape; rewards of earlier turns do not count."""


def without_asking(order: Order, stop: StopReason) -> float | None:
    """The reward, if it does not depend on the environment's score; otherwise None."""
    if stop in TRUNCATED and order.limits.on_truncation == "zero":
        return 0.0
    return order.broken_reward if stop in PROVOKED else None


def with_length(
    order: Order, reward: float, parts: dict[str, float], num_sampled: int
) -> tuple[float, dict[str, float]]:
    """``reward`` and its parts, less the cost of the last tokens before the limit."""
    cost = _cost_of_length(order, num_sampled)
    return (reward - cost, {**parts, "overlong": -cost}) if cost else (reward, parts)


def _cost_of_length(order: Order, num_sampled: int) -> float:
    limits = order.limits
    if limits.overlong_tokens is None or order.lease.split is not Split.TRAIN:
        return 0.0
    over = num_sampled - (limits.max_episode_tokens - limits.overlong_tokens)
    return min(1.0, max(0.0, over / limits.overlong_tokens))
