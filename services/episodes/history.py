"""The history of an episode: messages for the chat format, tokens in its ledger, and a snapshot to resume from.

Rule: messages and tokens never come apart. If new messages cannot be appended to the sampled tokens, a new branch
begins with the whole conversation rendered anew, and the reason is counted.
A snapshot of the world between two turns is kept beside the segments, so that another worker can resume. The same
attempt resumes from it only if it holds every action of the segments: an older world would have to act again although
the action may have had its effect already. Then a new attempt begins at the world and samples the later turns anew, or
the episode is replayed if the environment declares that harmless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import msgspec

from gspo_core.chat import ChatCodec, NotText
from gspo_core.environment_contract import IMAGES, EnvironmentFailed, Start
from gspo_core.episode_limits import TurnTally, within
from gspo_core.messages import ForkReason, Message, ParsedTurn, ToolSchema
from gspo_core.types import Segment, StopReason
from services.episodes.metering import Counters
from services.episodes.tree import Ledger

# Number of a snapshot's format.
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
    """The environment's own."""
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


class Conversation:
    """The conversation of one attempt; ``ledger`` is empty at first."""

    def __init__(
        self,
        codec: ChatCodec,
        ledger: Ledger,
        counters: Counters,
        max_context_tokens: int,
        max_observation_chars: int,
    ) -> None:
        self.ledger = ledger
        self.messages: list[Message] = []
        self.tools: Sequence[ToolSchema] = ()
        self.num_prompt_tokens = 0
        """Length of the first prompt, even if it is too long."""
        self._codec = codec
        self._counters = counters
        self._max_context_tokens = max_context_tokens
        self._max_observation_chars = max_observation_chars

    @property
    def num_turns(self) -> int:
        """Including the open turn."""
        return len(self.ledger.turns)

    def begin(self, start: Start) -> StopReason | None:
        """Opens the first turn, or returns why it cannot."""
        self.messages, self.tools = list(start.messages), start.tools
        prompt = self._render()
        self.num_prompt_tokens = len(prompt)
        if len(prompt) >= self._max_context_tokens:
            return StopReason.CONTEXT_OVERFLOW
        self.ledger.observe(prompt)
        return None

    def go_on(self, world: WorldSnapshot, record: Sequence[Segment]) -> None:
        """Resumes from ``world``, with all of ``record``."""
        self.messages = list(cast(list[Message], world.messages))
        self.tools = cast(list[ToolSchema], world.tools)
        world.rebuild(self.ledger, record)

    def parse(self) -> ParsedTurn:
        """The last sampled turn."""
        return self._codec.parse(self.ledger.open.sampled, self.tools)

    def read(self, parsed: ParsedTurn, messages: Sequence[Message]) -> StopReason | None:
        """Opens the next turn with ``messages``, which answer ``parsed``."""
        codec, ledger = self._codec, self.ledger
        messages, num_cut = within(messages, self._max_observation_chars)
        if num_cut:
            self._counters.add("observations/cut", num_cut)
        sampled = ledger.open.sampled
        with _wording():
            bridge = codec.bridge(ledger.open.prompt, sampled, messages, history=self.messages, tools=self.tools)
        self.messages += [codec.message(sampled, self.tools, turn=parsed), *messages]
        if isinstance(bridge, ForkReason):
            self._counters.add("drift/forks")
            self._counters.add(f"drift/forks_{bridge}")
            token_ids = self._render()
            num_tokens, read = len(token_ids), ledger.fork
        else:
            token_ids = bridge
            num_tokens, read = ledger.num_tokens + len(token_ids), ledger.observe
        if num_tokens >= self._max_context_tokens:
            return StopReason.CONTEXT_OVERFLOW
        read(token_ids)
        return None

    def _render(self) -> list[int]:
        with _wording():
            return self._codec.render(self.messages, self.tools)


@contextlib.contextmanager
def _wording() -> Iterator[None]:
    """Turns errors of the chat format into failures: it may be unable to render what an environment shows."""
    try:
        yield
    except NotText as error:
        raise EnvironmentFailed(IMAGES, str(error)) from error
    except ValueError as error:
        raise EnvironmentFailed("prompt", str(error)) from error
