"""The tokens of an attempt whose environment holds the loop: a tree with one open turn at a time.

Rule: the newest turn is the open one; a rewritten history goes on in a new branch, and nothing comes back to an older.
Sampled tokens go in circles if the last ones are one short piece, again and again: only exact repetition counts, so
that nothing a person would call a text is ever cut off.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gspo_core.token_ids import TokenIds
from gspo_core.types import Segment, Spent
from services.episodes.policy import Sampled
from services.episodes.tree import LedgerConflict, TokenTree, TurnTokens

# Longer pieces are no stutter: lists and tables repeat lines.
LONGEST_PIECE = 64
# The fewest repeats that count.
FEWEST_REPEATS = 4


class Ledger(TokenTree):
    """One attempt of one episode; ``prompt`` is sent to an engine next."""

    @property
    def open(self) -> TurnTokens:
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

    def record(self, sampled: Sampled, spent: Spent | None = None) -> list[Segment]:
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


def goes_in_circles(sampled: array[int], num_tokens: int) -> bool:
    """Whether the last ``num_tokens`` are repetitions of one piece."""
    if len(sampled) < num_tokens:
        return False
    tail = sampled[-num_tokens:]
    longest = min(LONGEST_PIECE, num_tokens // FEWEST_REPEATS)
    return any(tail[piece:] == tail[:-piece] for piece in range(1, longest + 1))
