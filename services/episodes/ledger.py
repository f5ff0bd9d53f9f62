"""The tokens of one attempt of an episode: those that the policy read, those that it sampled, and their versions.

Rule: append-only. The ids sent to the engine are exactly the ids of the ledger, a sampled id is never encoded again,
and each prompt is checked to begin with the one before. A rewritten history is a new branch, never an edit.
The ledger cuts itself into segments, one per (turn, version); it knows neither text, nor engines, nor storage.
Sampled tokens go in circles if the last ones are one short piece, again and again: only exact repetition counts, so
that nothing a person would call a text is ever cut off.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gspo_core.token_ids import TokenIds
from gspo_core.types import CacheMode, EpisodeKey, Outcome, Segment, Spent, TurnReward
from services.engines.protocol import Span
from services.episodes.policy import Sampled

# Longer pieces are no stutter: lists and tables repeat lines.
LONGEST_PIECE = 64
# The fewest repeats that count.
FEWEST_REPEATS = 4


def _packed(ids: Sequence[int] = ()) -> array[int]:
    return array("i", ids)


class LedgerConflict(Exception):
    """Tokens do not continue this ledger; going on would falsify the record."""


@dataclass(slots=True)
class LedgerTurn:
    """The tokens of one assistant turn."""

    observed: array[int] = field(default_factory=_packed)
    """Read before it: the first prompt, or the bridge from the previous turn."""
    sampled: array[int] = field(default_factory=_packed)


class Ledger:
    """One attempt of one episode; ``prompt`` is sent to an engine next."""

    def __init__(self, key: EpisodeKey, attempt: int, temperature: float) -> None:
        self.key = key
        self.attempt = attempt
        self.temperature = temperature
        self.turns: list[LedgerTurn] = []
        self.num_segments = 0
        self.num_sampled = 0
        self.versions: set[int] = set()
        """The versions that sampled at least one token."""
        self.last_engine = ""
        self.turn_rewards: tuple[TurnReward, ...] = ()
        """What turns were paid, once the episode is scored."""
        self._branch = 0
        self._token_ids = TokenIds()
        self._num_sealed = 0
        """Tokens of the branch that are in a segment; observed tokens wait for the segment that answers them."""
        self._last_prompt = (0, 0)
        """Its length and digest."""
        self._last_version: int | None = None

    @property
    def num_forks(self) -> int:
        """How often the history was rewritten."""
        return self._branch

    @property
    def num_tokens(self) -> int:
        """Tokens of the current branch."""
        return len(self._token_ids)

    @property
    def context(self) -> Sequence[int]:
        """The context of the open turn: all ids of the branch before its sampled ones."""
        return self._token_ids.head(len(self._token_ids) - len(self.turns[-1].sampled))

    def prompt(self) -> TokenIds:
        """All ids so far; it grows with the ledger."""
        prompt = self._token_ids
        length, digest = self._last_prompt
        if prompt.digest(length) != digest:
            raise LedgerConflict(f"{self.key}: the prompt of turn {len(self.turns) - 1} rewrites an earlier one")
        self._last_prompt = (len(prompt), prompt.digest(len(prompt)))
        return prompt

    def observe(self, token_ids: Sequence[int]) -> None:
        """Opens the next turn with the tokens that the policy reads before it."""
        if not token_ids:
            raise LedgerConflict(f"{self.key}: a turn must start with at least one observed token")
        self.turns.append(LedgerTurn(observed=_packed(token_ids)))
        self._token_ids.extend(self.turns[-1].observed)

    def fork(self, token_ids: Sequence[int]) -> None:
        """Opens the next turn on a newly rendered history: a new branch, all of whose tokens are read."""
        self._branch += 1
        self._token_ids, self._last_prompt, self._num_sealed = TokenIds(), (0, 0), 0
        self.observe(token_ids)

    def record(self, sampled: Sampled, spent: Spent | None = None) -> list[Segment]:
        """Adds sampled tokens to the open turn; returns the segments that hold them, one per version.

        The first of them carries the time that was ``spent``.
        """
        if not self.turns:
            raise LedgerConflict(f"{self.key}: nothing can be sampled before the first prompt")
        named = zip(sampled.versions, sampled.generation.spans, strict=True)
        cuts = [(version, span) for version, span in named if span.end > span.start]
        return [self._cut(sampled, *cut, None if place else spent) for place, cut in enumerate(cuts)]

    def restore(self, segment: Segment) -> None:
        """Adds a durable segment; its observed tokens must be those that were just observed again."""
        expected = (self.key, self.attempt, self._branch, self.num_segments, len(self.turns) - 1)
        found = (segment.key, segment.attempt, segment.branch, segment.index, segment.turn)
        num_observed = segment.num_tokens - segment.num_actions
        token_ids: list[int] = segment.token_ids.tolist()
        if found != expected or segment.is_final or segment.action_mask[:num_observed].any():
            raise LedgerConflict(f"{self.key}: segment {found} does not continue at {expected}")
        if token_ids[:num_observed] != self._token_ids[self._num_sealed :]:
            raise LedgerConflict(f"{self.key}: segment {segment.index} was sampled after a different observation")
        self._sample(token_ids[num_observed:], segment.version, segment.engine_id)
        self.num_segments += 1

    def close(self, outcome: Outcome, *, version: int = 0, spent: Spent | None = None) -> Segment:
        """The last segment. ``version`` counts only when nothing was ever sampled."""
        return self._seal(
            (),
            version=version if self._last_version is None else self._last_version,
            engine_id=self.last_engine,
            outcome=outcome,
            spent=spent,
        )

    def _cut(self, sampled: Sampled, version: int, span: Span, spent: Spent | None) -> Segment:
        num_sealed = self._num_sealed
        self._sample(sampled.generation.output_ids[span.start : span.end], version, sampled.engine_id)
        self._num_sealed = num_sealed
        return self._seal(
            sampled.generation.logprobs[span.start : span.end],
            version=version,
            engine_id=sampled.engine_id,
            cache_mode=sampled.cache_mode,
            spent=spent,
        )

    def _seal(
        self,
        logprobs: Sequence[float],
        *,
        version: int,
        engine_id: str,
        cache_mode: CacheMode = CacheMode.FRESH,
        outcome: Outcome | None = None,
        spent: Spent | None = None,
    ) -> Segment:
        """The tokens that are in no segment yet; ``logprobs`` are those of the last ones, which were sampled."""
        token_ids = self._token_ids.since(self._num_sealed)
        action_mask, behavior_logprobs = masked(len(token_ids), logprobs)
        segment = Segment(
            key=self.key,
            attempt=self.attempt,
            branch=self._branch,
            index=self.num_segments,
            turn=max(len(self.turns) - 1, 0),
            version=version,
            temperature=self.temperature,
            engine_id=engine_id,
            token_ids=token_ids,
            action_mask=action_mask,
            behavior_logprobs=behavior_logprobs,
            cache_mode=cache_mode,
            outcome=outcome,
            spent=spent,
            turn_rewards=self.turn_rewards if outcome is not None else (),
        )
        self.num_segments += 1
        self._num_sealed = len(self._token_ids)
        return segment

    def _sample(self, action_ids: Sequence[int], version: int, engine_id: str) -> None:
        self._token_ids.extend(action_ids)
        self.turns[-1].sampled.extend(action_ids)
        self._num_sealed = len(self._token_ids)
        self.num_sampled += len(action_ids)
        self.versions.add(version)
        self._last_version, self.last_engine = version, engine_id


def masked(num_tokens: int, logprobs: Sequence[float]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Action mask and log-probs of tokens whose last ones were sampled with ``logprobs``."""
    num_observed = num_tokens - len(logprobs)
    action_mask = np.zeros(num_tokens, dtype=np.bool_)
    action_mask[num_observed:] = True
    behavior_logprobs = np.zeros(num_tokens, dtype=np.float32)
    behavior_logprobs[num_observed:] = logprobs
    # Read-only, so that a segment need not copy them.
    action_mask.flags.writeable = behavior_logprobs.flags.writeable = False
    return action_mask, behavior_logprobs


def goes_in_circles(sampled: array[int], num_tokens: int) -> bool:
    """Whether the last ``num_tokens`` are repetitions of one piece."""
    if len(sampled) < num_tokens:
        return False
    tail = sampled[-num_tokens:]
    longest = min(LONGEST_PIECE, num_tokens // FEWEST_REPEATS)
    return any(tail[piece:] == tail[:-piece] for piece in range(1, longest + 1))
