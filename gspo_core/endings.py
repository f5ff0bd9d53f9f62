"""When an episode ends, and which rewards follow from its end alone.

Rule: an episode that the policy broke gets the reward for that, whatever its turns paid before; a truncated one is
scored or not, as its limits say. No reward is made up for an environment that fails: that is an error.
A tally is plain numbers, kept with the world, so that an episode that moves is judged like one that stayed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gspo_core.messages import ParsedTurn
from gspo_core.spec import EpisodeLimits
from gspo_core.types import StopReason

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


def settled_reward(stop: StopReason, *, on_truncation: Literal["score", "zero"], broken_reward: float) -> float | None:
    """The reward, if it does not depend on the environment's score; otherwise None."""
    if stop in TRUNCATED and on_truncation == "zero":
        return 0.0
    return broken_reward if stop in PROVOKED else None


class TurnTally(msgspec.Struct):
    """The turns of one attempt: calls, mistakes in writing them, rewards."""

    num_calls: int = 0
    num_parse_errors: int = 0
    consecutive_parse_errors: int = 0
    turn_rewards: float = 0.0
    """Their sum, also of turns that an earlier release kept no more of."""
    by_turn: dict[int, float] = {}

    def pay(self, turn: int, reward: float) -> None:
        self.turn_rewards += reward
        self.by_turn[turn] = self.by_turn.get(turn, 0.0) + reward

    def judge(self, parsed: ParsedTurn, limits: EpisodeLimits) -> StopReason | None:
        """Why this turn ends the episode by itself, before anything acts on it: its structure, or a limit."""
        if not parsed.complete:
            return StopReason.PARSE_ERROR
        self.num_calls += len(parsed.calls)
        self.num_parse_errors += parsed.has_parse_error
        self.consecutive_parse_errors = self.consecutive_parse_errors + 1 if parsed.has_parse_error else 0
        if self.consecutive_parse_errors > limits.on_parse_error.feedback:
            return StopReason.PARSE_ERROR
        return StopReason.MAX_TOOL_CALLS if self.num_calls > limits.max_tool_calls else None
