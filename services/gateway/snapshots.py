"""What is kept of an agent's episode beside its segments, so that another gateway can go on with it.

Rule: no token and no message. Tokens are in the segments, and messages come again with each request; here are the
digests by which requests find their turn, what was delivered, and what the agent was paid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gspo_core.types import Segment
from services.gateway.history import TurnEntry

SCHEMA = 1
KIND = "agent"
# A larger value in one call would hold up every other client.
MAX_SNAPSHOT_BYTES = 1024 * 1024


class SnapshotTooLarge(Exception):
    """The episode has more turns than can be kept."""


def check_room(num_bytes: int) -> None:
    """Raises ``SnapshotTooLarge`` where an episode's snapshot would have so many."""
    if num_bytes > MAX_SNAPSHOT_BYTES:
        raise SnapshotTooLarge(f"it has {num_bytes} bytes, more than {MAX_SNAPSHOT_BYTES}")


class Reward(msgspec.Struct, frozen=True, array_like=True):
    """One reward that the agent posted."""

    token: str
    """Equal tokens mean the same reward."""
    turn: int | None
    """None: of the whole episode."""
    value: float


class TreeSnapshot(msgspec.Struct, frozen=True):
    turns: list[TurnEntry]
    rewards: list[Reward]
    stopped: str = ""
    """The limit that the last request met."""
    finished: bool = False
    """The agent said that it is done."""
    kind: str = KIND
    schema: int = SCHEMA

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> TreeSnapshot | None:
        """None if it is of another kind, or if another release wrote it."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError:
            return None
        return found if (found.kind, found.schema) == (KIND, SCHEMA) else None

    def covers(self, record: Sequence[Segment]) -> bool:
        """Whether it names every turn that the segments hold tokens of."""
        return {segment.turn for segment in record} <= {entry.number for entry in self.turns}


class RewardRefused(ValueError):
    """The text says why."""


class Rewards:
    """The rewards that an agent posted."""

    def __init__(self, posted: Sequence[Reward] = ()) -> None:
        self.posted = list(posted)

    def add(self, value: float, turn: int | None, token: str) -> bool:
        """Whether it is a new one. Raises ``RewardRefused``."""
        if not math.isfinite(value):
            raise RewardRefused(f"a reward is a finite number, not {value}")
        known = next((one for one in self.posted if token and one.token == token), None)
        if known is None:
            self.posted.append(Reward(token, turn, float(value)))
        elif (known.turn, known.value) != (turn, value):
            raise RewardRefused("another reward was posted with this token")
        return known is None

    @property
    def final(self) -> float | None:
        """Of the whole episode: the last one stands."""
        return next((one.value for one in reversed(self.posted) if one.turn is None), None)

    def by_turn(self) -> dict[int, float]:
        sums: dict[int, float] = {}
        for one in self.posted:
            if one.turn is not None:
                sums[one.turn] = sums.get(one.turn, 0.0) + one.value
        return sums
