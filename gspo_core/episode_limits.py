"""What the limits of an episode do: when it ends, which rewards follow from that alone, how much it is shown.

Rule: an episode that the policy broke gets the reward for that, whatever its turns paid before; a truncated one is
scored or not, as its limits say. No reward is made up for an environment that fails: that is an error.
A tally is plain numbers, kept with the world, so that an episode that moves is judged like one that stayed.
A mark in the text says where an observation was cut and how much is missing. The cut depends on the text alone, so a
replayed episode is cut alike. The first prompt is never cut: a task that does not fit the context is for its author to
shorten.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from gspo_core.messages import Message, ParsedTurn
from gspo_core.spec import EpisodeLimits
from gspo_core.types import StopReason

# Sampled tokens go in circles if the last ones are one short piece, again and again. Only exact repetition counts, so
# that nothing a person would call a text is ever cut off; longer pieces are no stutter: lists and tables repeat lines.
LONGEST_PIECE = 64
# The fewest repeats that count.
FEWEST_REPEATS = 4

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
# Share of the kept text that is its beginning; the rest is its end, where results and errors often are.
_HEAD = 0.75


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


def within(messages: Sequence[Message], most_chars: int) -> tuple[list[Message], int]:
    """The messages with at most so many characters of text each, and how many of them were cut."""
    cut = [_message(message, most_chars) for message in messages]
    return [message for message, _ in cut], sum(was_cut for _, was_cut in cut)


def _message(message: Message, most_chars: int) -> tuple[Message, bool]:
    content = message.get("content")
    if content is None:
        return message, False
    if isinstance(content, str):
        if len(content) <= most_chars:
            return message, False
        return {**message, "content": _text(content, most_chars)}, True
    text = "".join(part.get("text", "") for part in content)
    if len(text) <= most_chars:
        return message, False
    others = [part for part in content if not part.get("text")]
    return {**message, "content": [{"type": "text", "text": _text(text, most_chars)}, *others]}, True


def _text(text: str, most_chars: int) -> str:
    head = int(_HEAD * most_chars)
    tail = most_chars - head
    return f"{text[:head]}\n[... {len(text) - most_chars} characters left out ...]\n{text[len(text) - tail :]}"


def limit_met(limits: EpisodeLimits, sampled: array[int], num_tokens: int, most_tokens: int) -> StopReason | None:
    """The limit that ends a turn of these ``sampled`` tokens, where its branch has ``num_tokens``."""
    circle = limits.max_repetition_tokens
    if circle is not None and goes_in_circles(sampled, circle):
        return StopReason.REPETITION
    return StopReason.CONTEXT_OVERFLOW if num_tokens >= most_tokens else None


def goes_in_circles(sampled: array[int], num_tokens: int) -> bool:
    """Whether the last ``num_tokens`` are repetitions of one piece."""
    if len(sampled) < num_tokens:
        return False
    tail = sampled[-num_tokens:]
    longest = min(LONGEST_PIECE, num_tokens // FEWEST_REPEATS)
    return any(tail[piece:] == tail[:-piece] for piece in range(1, longest + 1))
