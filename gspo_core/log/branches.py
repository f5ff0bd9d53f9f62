"""How the turns of an episode hang together: which turn each continues, and what it shares with an earlier branch.

Rule: where an agent asked for a turn, its record names the turn it continues; elsewhere that is read from the token
ids: a branch continues the last turn that it repeats whole. It reads no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from gspo_core.log.transcript import Link
from gspo_core.types import Segment

# The reason of a conversation of its own.
SUB_AGENT = "sub_agent"


@dataclass(slots=True)
class _Branch:
    ids: NDArray[np.int32]
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Each of its turns, with the number of tokens up to its end."""

    def shared_with(self, other: _Branch) -> int:
        """How many tokens both begin with."""
        length = min(len(self.ids), len(other.ids))
        differs = self.ids[:length] != other.ids[:length]
        return int(differs.argmax()) if differs.any() else length

    def last_turn_within(self, length: int) -> int | None:
        return next((turn for turn, end in reversed(self.ends) if end <= length), None)


def links(segments: Sequence[Segment]) -> dict[int, Link]:
    """By turn. ``segments`` stand branch by branch."""
    untrained = {turn for one in segments for turn in one.untrained_turns}
    repeats = {turn: times for one in segments for turn, times in one.repeated}
    earlier: list[_Branch] = []
    found: dict[int, Link] = {}
    for _, group in groupby(segments, key=lambda one: one.branch):
        pieces = list(group)
        branch = _branch(pieces)
        shared, before = _beginning(branch, earlier)
        read_again = _num_read_again(pieces, shared)
        for turn, own in groupby(pieces, key=lambda one: one.turn):
            asked = next((one.asked for one in own if one.asked is not None), None)
            found[turn] = {
                "parent": before if asked is None else asked.parent,
                "reason": (asked.reason or None) if asked is not None else None,
                "shared_tokens": shared,
                "tokens_read_again": read_again,
                "is_trained": turn not in untrained,
                "request": None
                if asked is None
                else {
                    "dialect": asked.dialect,
                    "model": asked.model,
                    "num_messages": asked.num_messages,
                    "num_new_messages": asked.num_messages - asked.num_old,
                    "num_repeats": repeats.get(turn, 0),
                },
            }
            before, shared, read_again = turn, 0, 0
        earlier.append(branch)
    return found


def drift(segments: Sequence[Segment]) -> tuple[Counter[str], int]:
    """How many branches of an episode began for which reason, and the tokens that were read anew for them: their
    prompts, without what an earlier branch has too. What a sub-agent reads is new, and does not count."""
    reasons, num_anew = Counter[str](), 0
    if all(one.branch == 0 for one in segments):
        return reasons, num_anew
    earlier: list[_Branch] = []
    for _, group in groupby(sorted(segments, key=lambda one: one.branch), key=lambda one: one.branch):
        pieces = list(group)
        branch, asked = _branch(pieces), next((one.asked for one in pieces if one.asked is not None), None)
        if asked is not None and asked.reason:
            reasons[asked.reason] += 1
            num_anew += _num_read_again(pieces, _beginning(branch, earlier)[0])
        earlier.append(branch)
    return reasons, num_anew


def _num_read_again(pieces: Sequence[Segment], shared: int) -> int:
    """Prompt tokens that a branch read anew, behind the first ``shared``, which an earlier one has."""
    asked = next((one.asked for one in pieces if one.asked is not None), None)
    if asked is None or not asked.reason or asked.reason == SUB_AGENT:
        return 0
    return max(_num_before_actions(pieces) - shared, 0)


def _num_before_actions(pieces: Sequence[Segment]) -> int:
    """Up to the first sampled token."""
    mask = np.concatenate([one.action_mask for one in pieces])
    return int(mask.argmax()) if mask.any() else len(mask)


def _branch(pieces: Sequence[Segment]) -> _Branch:
    branch, length = _Branch(np.concatenate([one.token_ids for one in pieces])), 0
    for turn, own in groupby(pieces, key=lambda one: one.turn):
        length += sum(one.num_tokens for one in own)
        branch.ends.append((turn, length))
    return branch


def _beginning(branch: _Branch, earlier: Sequence[_Branch]) -> tuple[int, int | None]:
    """How many of its first tokens an earlier branch has, and the last turn that is whole among them."""
    shared, nearest = max(((branch.shared_with(one), -place) for place, one in enumerate(earlier)), default=(0, 0))
    return shared, earlier[-nearest].last_turn_within(shared) if earlier else None
