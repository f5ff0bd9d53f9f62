"""What is kept of an agent's episode beside its segments, so that another gateway can go on with it.

Rule: no token and no message. Tokens are in the segments, and messages come again with each request; here are the
digests by which requests find their turn, what was delivered, and what the agent was paid.

It is kept in parts, each with the turns and rewards that are new or have changed: what is written for a turn does not
grow with the turns before it. Whatever is not known to be stored as it is now comes with the next part. Of each turn
the last part that names it counts, so a part may be stored twice, or one left out whose turns come again in the next.
Parts are never put together in Redis: all of them have a few hundred bytes a turn and are read once, by a gateway that
takes the episode over. Nothing is stored here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gspo_core.types import Segment, StopReason
from services.episodes.matching import TurnEntry

# 1 is the whole tree, which a release wrote at each turn. It is the first part of an episode that goes on here.
SCHEMA = 2
WHOLE = 1
KIND = "agent"
# For all parts, some twenty thousand turns: reading them must not hold up other clients for long.
MAX_SNAPSHOT_BYTES = 16 * 1024 * 1024


class SnapshotTooLarge(Exception):
    """The episode has more turns than can be kept."""


def check_room(num_bytes: int) -> None:
    """Raises ``SnapshotTooLarge`` where an episode's snapshot would have so many."""
    if num_bytes > MAX_SNAPSHOT_BYTES:
        raise SnapshotTooLarge(f"it has {num_bytes} bytes, more than {MAX_SNAPSHOT_BYTES}")


class StoredReward(msgspec.Struct, frozen=True, array_like=True):
    """One reward that the agent posted."""

    token: str
    """Equal tokens mean the same reward."""
    turn: int | None
    """None: of the whole episode."""
    value: float


class TreeSnapshot(msgspec.Struct, frozen=True):
    """A part, or all parts together."""

    turns: list[TurnEntry]
    rewards: list[StoredReward]
    """Those that follow the first ``num_rewards`` ones."""
    stopped: str = ""
    """The limit that the last request met."""
    finished: bool = False
    """The agent said that it is done."""
    kind: str = KIND
    schema: int = SCHEMA
    num_rewards: int = 0
    num_refused: int = 0
    """Rewards, by all gateways that held it."""
    num_kept: int = 0
    """Size of all parts together, in Redis."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> TreeSnapshot | None:
        """None if it is of another kind, or if a later release wrote it."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError:
            return None
        return found if found.kind == KIND and WHOLE <= found.schema <= SCHEMA else None

    @classmethod
    def together(cls, parts: Sequence[bytes]) -> TreeSnapshot | None:
        """None if one of them cannot be read."""
        turns, rewards, last = dict[int, TurnEntry](), list[StoredReward](), None
        for data in parts:
            last = cls.decode(data)
            if last is None:
                return None
            turns |= {entry.number: entry for entry in last.turns}
            rewards[last.num_rewards :] = last.rewards
        if last is None:
            return None
        last = msgspec.structs.replace(last, turns=[*turns.values()], rewards=rewards, num_rewards=0)
        return msgspec.structs.replace(last, num_kept=sum(map(len, parts)))

    def covers(self, record: Sequence[Segment]) -> bool:
        """Whether it names every turn that the segments hold tokens of."""
        return {segment.turn for segment in record} <= {entry.number for entry in self.turns}


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


class RewardRefused(ValueError):
    """The text says why."""


class Rewards:
    """The rewards that an agent posted. What one more costs grows with the turns that were paid, and not with these."""

    def __init__(self, posted: Iterable[StoredReward] = ()) -> None:
        self.posted: list[StoredReward] = []
        self.final: float | None = None
        """The reward of the whole episode; the last one stands."""
        self._by_turn: dict[int, float] = {}
        self._by_token: dict[str, StoredReward] = {}
        self._again = Counter[int | None]()
        for one in posted:
            self.add(one)

    @classmethod
    def come_again(cls, posted: Sequence[StoredReward]) -> Rewards:
        """The rewards when an agent begins again: it will post those without a token once more."""
        rewards = cls(posted)
        rewards._again.update(one.turn for one in posted if not one.token)
        return rewards

    def knows(self, reward: StoredReward) -> bool:
        """Whether one of them has its token. Raises ``RewardRefused``."""
        if not math.isfinite(reward.value):
            raise RewardRefused(f"a reward is a finite number, not {reward.value}")
        known = self._by_token.get(reward.token, reward)
        if (known.turn, known.value) != (reward.turn, reward.value):
            raise RewardRefused("another reward was posted with this token")
        return reward.token in self._by_token

    def comes_again(self, reward: StoredReward) -> bool:
        return not reward.token and self._again[reward.turn] > 0

    def add(self, reward: StoredReward) -> None:
        """One that is not known."""
        if self.comes_again(reward):
            self._again[reward.turn] -= 1
            return
        self.posted.append(reward)
        if reward.token:
            self._by_token[reward.token] = reward
        self.final = _paid(self.final, self._by_turn, reward)

    def amounts_with(self, reward: StoredReward) -> list[float]:
        """Whose sum the episode is worth, as far as it was posted, once ``reward`` is added."""
        final, by_turn = self.final, self.by_turn()
        if not self.comes_again(reward):
            final = _paid(final, by_turn, reward)
        return [final or 0.0, *by_turn.values()]

    def by_turn(self) -> dict[int, float]:
        return dict(self._by_turn)


def _paid(final: float | None, by_turn: dict[int, float], reward: StoredReward) -> float | None:
    """What was paid for the whole episode once this is; what is for a turn goes into ``by_turn``."""
    if reward.turn is None:
        return reward.value
    by_turn[reward.turn] = by_turn.get(reward.turn, 0.0) + reward.value
    return final
