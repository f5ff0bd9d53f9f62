"""Which turns and rewards of an episode the next part of its snapshot has to name.

Rule: whatever is not known to be stored as it is now comes with the next part. A part whose storing was given up has
changed nothing here. It stores nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gspo_core.types import StopReason
from services.episodes.matching import TurnEntry
from services.episodes.snapshots import StoredReward, TreeSnapshot


@dataclass(frozen=True, slots=True)
class TreePart:
    data: bytes
    turns: Mapping[int, bytes]
    """As they are in it."""
    num_rewards: int
    """With it: of the episode."""
    is_empty: bool
    """It says nothing that is not stored."""
    state: tuple[str, bool, int]


class TreeParts:
    """``num_bytes``: of all parts that are stored."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._stored: dict[int, bytes] = {}
        self._num_rewards = 0
        self._touched: dict[int, None] = {}
        self._due = set[int]()
        self._state = "", False, 0
        """The limit that was met, whether the agent is done, and how many rewards were refused, as they are stored."""

    def restore(self, tree: TreeSnapshot, numbers: Collection[int]) -> None:
        """This is what is stored. Turns of other ``numbers`` are nothing any more: a new one may have their number."""
        self._stored = {entry.number: _encoded(entry) for entry in tree.turns if entry.number in numbers}
        self._num_rewards = len(tree.rewards)
        self.num_bytes = max(tree.num_kept, len(tree.encode()))
        self._state = tree.stopped, tree.finished, tree.num_refused

    def touch(self, number: int, *, is_due: bool = False) -> None:
        """This turn may have changed, or be new. ``is_due``: its next tokens need what has changed."""
        self._touched[number] = None
        if is_due:
            self._due.add(number)

    @property
    def has_new(self) -> bool:
        """A turn was begun that is not stored, or is due."""
        return bool(self._due) or any(number not in self._stored for number in self._touched)

    def next(
        self,
        entries: Mapping[int, TurnEntry],
        changing: Collection[int],
        rewards: Sequence[StoredReward],
        stopped: StopReason | None,
        *,
        finished: bool,
        num_refused: int = 0,
    ) -> TreePart:
        """``changing``: turns that may change at any time."""
        numbers = {**self._touched, **dict.fromkeys(changing)}
        encoded = {number: _encoded(entries[number]) for number in numbers}
        since = self._num_rewards
        turns = [entries[number] for number, data in encoded.items() if self._stored.get(number) != data]
        new = list(rewards[since:])
        tree = TreeSnapshot(turns, new, stopped or "", finished, num_rewards=since, num_refused=num_refused)
        state = tree.stopped, finished, num_refused
        is_empty = not turns and not tree.rewards and state == self._state
        return TreePart(tree.encode(), encoded, len(rewards), is_empty, state)

    def stored(self, part: TreePart) -> None:
        self.num_bytes += len(part.data)
        self._state = part.state
        self._stored |= part.turns
        self._num_rewards = max(self._num_rewards, part.num_rewards)

    def settle(self, entries: Mapping[int, TurnEntry]) -> None:
        """Forgets the touched turns that are stored as they are now."""
        for number in [one for one in self._touched if self._stored.get(one) == _encoded(entries[one])]:
            del self._touched[number]
            self._due.discard(number)


def _encoded(entry: TurnEntry) -> bytes:
    """How often it was given again is told with its next change: a retry alone writes nothing."""
    return msgspec.msgpack.encode(msgspec.structs.replace(entry, num_repeats=0))
