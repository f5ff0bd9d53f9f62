"""The tokens of one attempt whose history is a tree: several branches, which may grow at the same time.

Rule: append-only. A branch that forks from inside another begins with that branch's own ids, which it only reads, so
each sampled token is an action of exactly one branch. The ids sent to the engine are the ids of the branch, and a
sampled id is never encoded again. Segments are numbered in the order in which they are cut, whatever their branch.
It knows neither text, nor engines, nor storage.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gspo_core.token_ids import TokenIds
from gspo_core.types import Asked, CacheMode, EpisodeKey, Outcome, Repeated, Segment, Spent, TurnReward
from services.episodes.ledger import LedgerConflict, masked
from services.episodes.policy import Sampled


@dataclass(slots=True, eq=False)
class _Branch:
    number: int
    ids: TokenIds = field(default_factory=TokenIds)
    num_sealed: int = 0
    """Of its tokens: those that are in a segment."""
    last_prompt: tuple[int, int] = (0, 0)
    """Its length and digest."""
    last_engine: str = ""
    """It has the branch in its prefix cache."""


@dataclass(slots=True, eq=False)
class TapedTurn:
    """One turn: where its branch stood when it was opened, and what was sampled since."""

    number: int
    branch: _Branch
    num_prompt: int
    """Tokens of the branch before the first sampled one."""
    sampled: array[int] = field(default_factory=lambda: array("i"))
    spans: list[tuple[int, int]] = field(default_factory=list)
    """The versions that sampled it, in order, each with the number of its tokens."""
    num_begun: int = 0
    """Of the prompt's tokens, the last ones: they begin the answer, and the policy went on from them."""
    asked: Asked | None = None
    """Recorded with its first tokens."""
    user: str = ""
    """As ``asked``."""

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
    def end(self) -> int:
        """Tokens of the branch up to its last sampled one."""
        return self.num_prompt + len(self.sampled)

    @property
    def is_tip(self) -> bool:
        return self.end == len(self.branch.ids)


class Tape:
    """One attempt of one episode."""

    def __init__(self, key: EpisodeKey, attempt: int, temperature: float) -> None:
        self.key = key
        self.attempt = attempt
        self.temperature = temperature
        self.turns: dict[int, TapedTurn] = {}
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
        self._last = (0, 0, 0, "")
        """Branch, turn, version and engine of the last segment."""

    def begin(self, turn: int, token_ids: Sequence[int]) -> TapedTurn:
        """Opens a turn on a branch of its own, all of whose tokens so far are read."""
        branch = _Branch(self.num_branches)
        self.num_branches += 1
        return self._open(turn, branch, token_ids)

    def go_on(self, turn: int, after: TapedTurn, token_ids: Sequence[int]) -> TapedTurn:
        """Opens a turn with the tokens that are read after the turn ``after``, which ends its branch."""
        if not after.is_tip:
            raise LedgerConflict(f"{self.key}: turn {after.number} is not the end of its branch")
        return self._open(turn, after.branch, token_ids)

    def fork(self, turn: int, after: TapedTurn, token_ids: Sequence[int]) -> TapedTurn:
        """Like ``go_on``, on a new branch: what lies before ``token_ids`` is copied, and only read."""
        return self.begin(turn, [*after.branch.ids.head(after.end), *token_ids])

    def prompt(self, turn: TapedTurn) -> TokenIds:
        """All ids of its branch, to sample behind."""
        branch = turn.branch
        length, digest = branch.last_prompt
        if not turn.is_tip or branch.ids.digest(length) != digest:
            raise LedgerConflict(f"{self.key}: the prompt of turn {turn.number} rewrites an earlier one")
        branch.last_prompt = (len(branch.ids), branch.ids.digest(len(branch.ids)))
        return branch.ids

    def record(self, turn: TapedTurn, sampled: Sampled, spent: Spent | None = None) -> list[Segment]:
        """Adds sampled tokens; returns the segments that hold them, one per version. The first carries ``spent``."""
        if not turn.is_tip:
            raise LedgerConflict(f"{self.key}: turn {turn.number} was continued already")
        generation, cut = sampled.generation, []
        for version, span in zip(sampled.versions, generation.spans, strict=True):
            if span.end > span.start:
                self._sample(turn, generation.output_ids[span.start : span.end], version, sampled.engine_id)
                logprobs = generation.logprobs[span.start : span.end]
                cut.append(self._seal(turn, logprobs, sampled.cache_mode, spent))
                spent = None
        return cut

    def restore(self, record: Sequence[Segment]) -> None:
        """Brings an empty tape to the end of durable segments. Raises ``LedgerConflict`` where they do not fit."""
        branches: dict[int, _Branch] = {}
        for segment in record:
            found, expected = (segment.key, segment.attempt, segment.index), (self.key, self.attempt, self.num_segments)
            num_observed = segment.num_tokens - segment.num_actions
            if found != expected or segment.is_final or segment.action_mask[:num_observed].any():
                raise LedgerConflict(f"{self.key}: segment {found} does not continue at {expected}")
            branch = branches.setdefault(segment.branch, _Branch(segment.branch))
            token_ids: list[int] = segment.token_ids.tolist()
            turn = self.turns.get(segment.turn)
            if turn is None:
                turn = self._open(segment.turn, branch, token_ids[:num_observed])
            elif num_observed or turn.branch is not branch or not turn.is_tip:
                raise LedgerConflict(f"{self.key}: segment {segment.index} does not continue turn {segment.turn}")
            self._sample(turn, token_ids[num_observed:], segment.version, segment.engine_id)
            self._sealed(turn, segment.version)
        self.num_branches = max(branches, default=-1) + 1

    def close(self, outcome: Outcome, *, version: int = 0, spent: Spent | None = None) -> Segment:
        """The last segment, which holds no tokens. ``version`` counts only when nothing was ever sampled."""
        branch, turn, last_version, engine_id = self._last
        action_mask, behavior_logprobs = masked(0, ())
        return Segment(
            key=self.key,
            attempt=self.attempt,
            branch=branch,
            index=self.num_segments,
            turn=turn,
            version=last_version if self.num_segments else version,
            temperature=self.temperature,
            engine_id=engine_id,
            token_ids=np.zeros(0, np.int32),
            action_mask=action_mask,
            behavior_logprobs=behavior_logprobs,
            outcome=outcome,
            spent=spent,
            untrained_turns=self.untrained_turns,
            turn_rewards=self.turn_rewards,
            repeated=self.repeated,
        )

    def _open(self, number: int, branch: _Branch, token_ids: Sequence[int]) -> TapedTurn:
        if not token_ids or number in self.turns:
            raise LedgerConflict(f"{self.key}: turn {number} was opened twice, or with no token to read before it")
        branch.ids.extend(token_ids)
        turn = self.turns[number] = TapedTurn(number, branch, len(branch.ids))
        return turn

    def _sample(self, turn: TapedTurn, action_ids: Sequence[int], version: int, engine_id: str) -> None:
        turn.branch.ids.extend(action_ids)
        turn.sampled.extend(action_ids)
        turn.spans.append((version, len(action_ids)))
        turn.branch.last_engine = engine_id
        self.num_sampled += len(action_ids)
        self.versions.add(version)

    def _seal(self, turn: TapedTurn, logprobs: Sequence[float], cache_mode: CacheMode, spent: Spent | None) -> Segment:
        branch, version = turn.branch, turn.spans[-1][0]
        token_ids = branch.ids.since(branch.num_sealed)
        action_mask, behavior_logprobs = masked(len(token_ids), logprobs)
        segment = Segment(
            key=self.key,
            attempt=self.attempt,
            branch=branch.number,
            index=self.num_segments,
            turn=turn.number,
            version=version,
            temperature=self.temperature,
            engine_id=branch.last_engine,
            token_ids=token_ids,
            action_mask=action_mask,
            behavior_logprobs=behavior_logprobs,
            cache_mode=cache_mode,
            spent=spent,
            asked=turn.asked if len(turn.spans) == 1 else None,
            user=turn.user if len(turn.spans) == 1 and turn.asked is not None else "",
        )
        self._sealed(turn, version)
        return segment

    def _sealed(self, turn: TapedTurn, version: int) -> None:
        branch = turn.branch
        branch.num_sealed = len(branch.ids)
        self.num_segments += 1
        self._last = (branch.number, turn.number, version, branch.last_engine)
