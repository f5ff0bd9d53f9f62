"""Snapshots of a world between two turns, kept beside the segments of its episode so that another worker can resume.

Rule: the same attempt resumes from a world only if it holds every action of the segments. An older world would have to
act again although the action may have had its effect already. Then a new attempt begins at the world and samples the
later turns anew, or the episode is replayed if the environment declares that harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from gspo_core.episode_limits import TurnTally
from gspo_core.types import Segment
from services.episodes.ledger import Ledger

SCHEMA = 2
# 1 had no rewards by turn in the tally.
READABLE = (1, SCHEMA)
# A larger value in one call would hold up every other client.
MAX_WORLD_BYTES = 1024 * 1024


class WorldSnapshotNotKept(Exception):
    """It is too large, or holds something that cannot be written down."""


class WorldSnapshot(msgspec.Struct, frozen=True):
    """The world after the environment answered and before the policy does."""

    turn: int
    """That is answered next."""
    branch: int
    observed: list[int]
    """The tokens that the turn begins with."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tally: TurnTally
    state: bytes
    """Of the environment."""
    schema: int = SCHEMA

    def encode(self) -> bytes:
        """Raises ``WorldSnapshotNotKept``."""
        try:
            data = msgspec.msgpack.encode(self)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise WorldSnapshotNotKept(str(error)) from error
        if len(data) > MAX_WORLD_BYTES:
            raise WorldSnapshotNotKept(f"it has {len(data)} bytes, more than {MAX_WORLD_BYTES}")
        return data

    @classmethod
    def decode(cls, data: bytes) -> WorldSnapshot | None:
        """None if another release wrote it."""
        try:
            found = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError:
            return None
        return found if found.schema in READABLE else None

    def stands_at(self, record: Sequence[Segment], stop_ids: Collection[int]) -> bool:
        """Whether it holds every action of ``record``, and no other."""
        return self.turn == num_finished_turns(record, stop_ids)

    def rebuild(self, ledger: Ledger, record: Sequence[Segment]) -> None:
        """Brings an empty ``ledger`` to where this world is, with the tokens sampled since."""
        for segment in record:
            if segment.turn == len(ledger.turns):
                observed = segment.token_ids[: segment.num_tokens - segment.num_actions].tolist()
                _open(ledger, segment.branch, observed)
            ledger.restore(segment)
        if self.turn == len(ledger.turns):
            _open(ledger, self.branch, self.observed)


def num_finished_turns(record: Sequence[Segment], stop_ids: Collection[int]) -> int:
    """Turns that the policy ended, so that the environment may have acted on them."""
    if not record:
        return 0
    last = record[-1]
    is_finished = bool(last.num_actions) and int(last.token_ids[-1]) in stop_ids
    return last.turn + is_finished


def _open(ledger: Ledger, branch: int, observed: Sequence[int]) -> None:
    (ledger.fork if branch > ledger.num_forks else ledger.observe)(observed)
