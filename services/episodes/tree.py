"""The tokens of one attempt of an episode: what the policy read, what it sampled, and under which versions.

Rule: append-only. The history is a tree, whose branches may grow at the same time: a rewritten history is a new branch,
never an edit. A branch that forks from inside another begins with that branch's own ids, which it only reads, so each
sampled token is an action of exactly one branch. The ids sent to the engine are the ids of the branch, a sampled id is
never encoded again, and each prompt is checked to begin with the one before. Segments, one per (turn, version), are
numbered in the order in which they are cut, whatever their branch. It knows neither text, nor engines, nor storage.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gspo_core.token_ids import TokenIds
from gspo_core.types import Asked, CacheMode, EpisodeKey, Outcome, Repeated, Segment, TimeSplit, TurnReward
from services.episodes.policy import Sampled, Span


class LedgerConflict(Exception):
    """Tokens do not continue what is there; going on would falsify the record."""


@dataclass(slots=True, eq=False)
class _Branch:
    number: int
    ids: TokenIds = field(default_factory=TokenIds)
    num_sealed: int = 0
    """How many of its tokens are in a segment. What was read waits for the segment that answers it."""
    last_prompt: tuple[int, int] = (0, 0)
    """Its length and digest."""
    last_engine: str = ""
    """It has the branch in its prefix cache."""


@dataclass(slots=True, eq=False)
class Turn:
    """One turn: where its branch stood when it was opened, and what was sampled since."""

    number: int
    branch: _Branch
    first: int
    """Tokens of the branch before those that were read for this turn."""
    num_prompt: int
    """Tokens of the branch before the first sampled one."""
    sampled: array[int] = field(default_factory=lambda: array("i"))
    spans: list[Span] = field(default_factory=list)
    """Tile ``sampled``; neighbours may have one version."""
    num_begun: int = 0
    """How many of the prompt's last tokens begin the answer; the policy went on from them."""
    asked: Asked | None = None
    """Recorded with its first tokens."""
    user: str = ""
    """As ``asked``."""

    @property
    def observed(self) -> Sequence[int]:
        """Read for it: the first prompt, or what came after the turn before."""
        return self.branch.ids.head(self.num_prompt)[self.first :]

    @property
    def prompt(self) -> Sequence[int]:
        """The ids before the answer."""
        return self.branch.ids.head(self.num_prompt - self.num_begun)

    @property
    def said(self) -> Sequence[int]:
        """The ids of the answer, sampled or not."""
        if not self.num_begun:
            return self.sampled
        return [*self.begun, *self.sampled]

    @property
    def begun(self) -> Sequence[int]:
        """The ids of the answer that were not sampled, but given."""
        return self.branch.ids.head(self.num_prompt)[self.num_prompt - self.num_begun :]

    @property
    def num_unsealed(self) -> int:
        """Tokens of its branch that the next segment holds beside what is sampled."""
        return len(self.branch.ids) - self.branch.num_sealed

    @property
    def end(self) -> int:
        """Tokens of the branch up to its last sampled one."""
        return self.num_prompt + len(self.sampled)

    @property
    def is_tip(self) -> bool:
        return self.end == len(self.branch.ids)


class TokenTree:
    """One attempt of one episode."""

    def __init__(self, key: EpisodeKey, attempt: int, temperature: float) -> None:
        self.key = key
        self.attempt = attempt
        self.temperature = temperature
        self.turns: dict[int, Turn] = {}
        self.num_segments = 0
        self.num_sampled = 0
        self.versions: set[int] = set()
        """The versions that sampled at least one token."""
        self.num_branches = 0
        self.untrained_turns: tuple[int, ...] = ()
        """Those that nobody ever had, once that is known."""
        self.turn_rewards: tuple[TurnReward, ...] = ()
        """What turns were paid, once that is known."""
        self.repeated: tuple[Repeated, ...] = ()
        """The turns that were given more than once, once that is known."""
        self._branches: dict[int, _Branch] = {}
        self._last = (0, 0, 0, "")
        """Branch, turn, version and engine of the last segment."""

    def open_turn(self, turn: int, after: Turn | None, token_ids: Sequence[int]) -> Turn:
        """Opens a turn behind ``after``: on its branch, unless something went on from there already."""
        if after is None:
            return self.begin(turn, token_ids)
        return (self.go_on if after.is_tip else self.branch_off)(turn, after, token_ids)

    def begin(self, turn: int, token_ids: Sequence[int]) -> Turn:
        """Opens a turn on a branch of its own, all of whose tokens so far are read."""
        return self._open(turn, self._branch(self.num_branches), token_ids)

    def go_on(self, turn: int, after: Turn, token_ids: Sequence[int]) -> Turn:
        """Opens a turn with the tokens that are read after the turn ``after``, which ends its branch."""
        if not after.is_tip:
            raise LedgerConflict(f"{self.key}: turn {after.number} is not the end of its branch")
        return self._open(turn, after.branch, token_ids)

    def branch_off(self, turn: int, after: Turn, token_ids: Sequence[int]) -> Turn:
        """Like ``go_on``, on a new branch: what lies before ``token_ids`` is copied, and only read."""
        return self.begin(turn, [*after.branch.ids.head(after.end), *token_ids])

    def prompt_of(self, turn: Turn) -> TokenIds:
        """All ids of its branch, to sample behind; it grows with the branch."""
        branch = turn.branch
        length, digest = branch.last_prompt
        if not turn.is_tip or branch.ids.digest(length) != digest:
            raise LedgerConflict(f"{self.key}: the prompt of turn {turn.number} rewrites an earlier one")
        branch.last_prompt = (len(branch.ids), branch.ids.digest(len(branch.ids)))
        return branch.ids

    def add(self, turn: Turn, sampled: Sampled, spent: TimeSplit | None = None) -> list[Segment]:
        """Adds sampled tokens; returns the segments that hold them, one per version. The first carries ``spent``."""
        if not turn.is_tip:
            raise LedgerConflict(f"{self.key}: turn {turn.number} was continued already")
        cut: list[Segment] = []
        for span in sampled.spans:
            if span.end > span.start:
                self._sample(turn, sampled.ids[span.start : span.end], span.version, sampled.engine_id)
                logprobs = sampled.logprobs[span.start : span.end]
                cut.append(self._cut(turn, logprobs, sampled.cache_mode, spent))
                spent = None
        return cut

    def restore(self, segment: Segment) -> None:
        """Adds a durable segment. Where its turn is open already, it must have read what was now read again."""
        found, expected = (segment.key, segment.attempt, segment.index), (self.key, self.attempt, self.num_segments)
        num_observed = segment.num_tokens - segment.num_actions
        if found != expected or segment.is_final or segment.action_mask[:num_observed].any():
            raise LedgerConflict(f"{self.key}: segment {found} does not continue at {expected}")
        token_ids: list[int] = segment.token_ids.tolist()
        turn = self.turns.get(segment.turn)
        if turn is None:
            turn = self._open(segment.turn, self._branch(segment.branch), token_ids[:num_observed])
        if turn.branch.number != segment.branch or not turn.is_tip:
            raise LedgerConflict(f"{self.key}: segment {segment.index} does not continue turn {segment.turn}")
        if token_ids[:num_observed] != turn.branch.ids[turn.branch.num_sealed :]:
            raise LedgerConflict(f"{self.key}: segment {segment.index} was sampled after a different observation")
        self._sample(turn, token_ids[num_observed:], segment.version, segment.engine_id)
        self._sealed(turn, segment.version)

    def close(self, outcome: Outcome, *, version: int = 0, spent: TimeSplit | None = None) -> Segment:
        """The last segment. ``version`` counts only when nothing was ever sampled."""
        branch, turn, token_ids = self._unanswered()
        last_version, last_engine = self._last[2:]
        return self._segment(
            *(branch, turn, last_version if self.num_segments else version, last_engine, token_ids, ()),
            outcome=outcome,
            spent=spent,
        )

    def _unanswered(self) -> tuple[int, int, NDArray[np.int32]]:
        """Branch, turn and tokens of the last segment. It has none: several turns may wait for their first."""
        return *self._last[:2], np.zeros(0, np.int32)

    def _branch(self, number: int) -> _Branch:
        self.num_branches = max(self.num_branches, number + 1)
        return self._branches.setdefault(number, _Branch(number))

    def _open(self, number: int, branch: _Branch, token_ids: Sequence[int]) -> Turn:
        if not token_ids or number in self.turns:
            raise LedgerConflict(f"{self.key}: turn {number} was opened twice, or with no token to read before it")
        first = len(branch.ids)
        branch.ids.extend(token_ids)
        turn = self.turns[number] = Turn(number, branch, first, len(branch.ids))
        return turn

    def _sample(self, turn: Turn, action_ids: Sequence[int], version: int, engine_id: str) -> None:
        turn.spans.append(Span(len(turn.sampled), len(turn.sampled) + len(action_ids), version))
        turn.branch.ids.extend(action_ids)
        turn.sampled.extend(action_ids)
        turn.branch.last_engine = engine_id
        self.num_sampled += len(action_ids)
        self.versions.add(version)

    def _cut(self, turn: Turn, logprobs: Sequence[float], cache_mode: CacheMode, spent: TimeSplit | None) -> Segment:
        branch, version, is_first = turn.branch, turn.spans[-1].version, len(turn.spans) == 1
        segment = self._segment(
            *(branch.number, turn.number, version, branch.last_engine, branch.ids.since(branch.num_sealed), logprobs),
            cache_mode=cache_mode,
            spent=spent,
            asked=turn.asked if is_first else None,
            user=turn.user if is_first and turn.asked is not None else "",
        )
        self._sealed(turn, version)
        return segment

    def _sealed(self, turn: Turn, version: int) -> None:
        branch = turn.branch
        branch.num_sealed = len(branch.ids)
        self.num_segments += 1
        self._last = (branch.number, turn.number, version, branch.last_engine)

    def _segment(
        self,
        branch: int,
        turn: int,
        version: int,
        engine_id: str,
        token_ids: NDArray[np.int32],
        logprobs: Sequence[float],
        *,
        cache_mode: CacheMode = CacheMode.FRESH,
        outcome: Outcome | None = None,
        spent: TimeSplit | None = None,
        asked: Asked | None = None,
        user: str = "",
    ) -> Segment:
        """``logprobs``: of the last tokens, which were sampled."""
        action_mask, behavior_logprobs = masked(len(token_ids), logprobs)
        is_last = outcome is not None
        return Segment(
            key=self.key,
            attempt=self.attempt,
            branch=branch,
            index=self.num_segments,
            turn=turn,
            version=version,
            temperature=self.temperature,
            engine_id=engine_id,
            token_ids=token_ids,
            action_mask=action_mask,
            behavior_logprobs=behavior_logprobs,
            cache_mode=cache_mode,
            outcome=outcome,
            spent=spent,
            asked=asked,
            user=user,
            untrained_turns=self.untrained_turns if is_last else (),
            turn_rewards=self.turn_rewards if is_last else (),
            repeated=self.repeated if is_last else (),
        )


class Ledger(TokenTree):
    """A tree with one open turn, the newest: where the environment holds the loop."""

    @property
    def open(self) -> Turn:
        if not self.turns:
            raise LedgerConflict(f"{self.key}: nothing can be sampled before the first prompt")
        return self.turns[len(self.turns) - 1]

    @property
    def num_forks(self) -> int:
        """How often the history was rewritten."""
        return max(self.num_branches - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of the current branch."""
        return len(self.open.branch.ids) if self.turns else 0

    @property
    def last_engine(self) -> str:
        return self._last[3]

    def prompt(self) -> TokenIds:
        """All ids so far; it grows with the ledger."""
        return self.prompt_of(self.open)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Opens the next turn with the tokens that the policy reads before it."""
        if self.turns:
            self.go_on(len(self.turns), self.open, token_ids)
        else:
            self.begin(0, token_ids)

    def fork(self, token_ids: Sequence[int]) -> None:
        """Opens the next turn on a newly rendered history: a new branch, all of whose tokens are read."""
        self.begin(len(self.turns), token_ids)

    def record(self, sampled: Sampled, spent: TimeSplit | None = None) -> list[Segment]:
        """Adds sampled tokens to the open turn; returns the segments that hold them."""
        return self.add(self.open, sampled, spent)

    def restore(self, segment: Segment) -> None:
        """Its turn is open: its observed tokens must be those that were just observed again."""
        if segment.turn != len(self.turns) - 1:
            raise LedgerConflict(
                f"{self.key}: a segment of turn {segment.turn} does not continue {len(self.turns)} turns"
            )
        super().restore(segment)

    def _unanswered(self) -> tuple[int, int, NDArray[np.int32]]:
        """What was read last and never answered."""
        if not self.turns:
            return super()._unanswered()
        branch = self.open.branch
        return branch.number, self.open.number, branch.ids.since(branch.num_sealed)


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
