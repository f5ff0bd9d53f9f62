"""The tally of an episode's turns: calls, mistakes in writing them, rewards; and whether a turn ends the episode.

Rule: plain numbers, kept with the world, so that an episode that moves is judged like one that stayed.
"""

from __future__ import annotations

import msgspec

from gspo_core.env import ParsedTurn
from gspo_core.spec import EpisodeLimits
from gspo_core.types import StopReason


class TurnTally(msgspec.Struct):
    """The tally of one attempt."""

    num_calls: int = 0
    num_parse_errors: int = 0
    consecutive_parse_errors: int = 0
    turn_rewards: float = 0.0

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
