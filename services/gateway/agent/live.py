"""A turn in progress: its answer so far, and the clients that wait for it; and requests that wait for one.

Rule: an answer is given whole or not at all; whoever waits is told of everything that is certain. It samples nothing.
Requests of one name are decided upon one after the other, in the order in which they came, and nothing is kept of a
name that nobody has or waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from gspo_core.chat import ChatCodec
from services.episodes.matching import TurnEntry
from services.episodes.metering import Counters
from services.episodes.reading import Reading, certain, certain_ids
from services.episodes.tree import Turn
from services.gateway.dialects.turns import Answer, Piece, Refusal, TurnRequest, call_id

# Its tools can be large, and an episode keeps each of its turns.
_ANSWERED = TurnRequest(())
Deciding: TypeAlias = dict[str, tuple[asyncio.Lock, int]]
"""By name, with the number of those who have it or wait for it."""


class LiveTurn:
    """A turn that was asked for here, until its answer is known and nobody is being given it. Asked for once more, it
    is read again from what was stored."""

    def __init__(self, id: str, entry: TurnEntry, tokens: Turn, ask: TurnRequest, codec: ChatCodec) -> None:
        self.id = id
        self.entry = entry
        self.tokens = tokens
        self.ask = replace(ask, messages=())  # a whole history each: no later turn needs it again
        self.answer: Answer | None = None
        self.refusal: Refusal | None = None
        self.deliveries: set[Delivery] = set()
        """Those on their way."""
        self._codec = codec
        self._changed = asyncio.Event()
        self._certain: Reading | None = None
        self._num_stored = len(tokens.sampled)
        self._num_read = 0

    @property
    def is_over(self) -> bool:
        return (self.answer is not None or self.refusal is not None) and not self.deliveries

    @property
    def changed(self) -> asyncio.Event:
        """Set when there is more to know than when it was asked for."""
        return self._changed

    def stored(self) -> None:
        """All that was sampled so far is durable."""
        self._num_stored = len(self.tokens.sampled)
        self.tell()

    def tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def settle(self, outcome: Answer | Refusal) -> None:
        if self.answer is None and self.refusal is None:
            if isinstance(outcome, Answer):
                self.answer, self.ask = outcome, _ANSWERED
            else:
                self.refusal = outcome
        self.tell()

    def certain(self) -> Reading:
        """All text, reasoning and calls that will not change."""
        num_sampled = self._num_stored
        if self._certain is None or num_sampled != self._num_read:
            ids = certain_ids(self._codec, self.tokens.sampled[:num_sampled], self.ask.stop)
            gives_calls = not self.entry.gives_no_calls
            self._certain = certain(self._codec, [*self.tokens.begun, *ids], self.ask.tools, gives_calls=gives_calls)
            self._num_read = num_sampled
        return self._certain


class Delivery:
    """The ``PendingAnswer`` of a turn, on its way to one client."""

    def __init__(
        self,
        turn: LiveTurn,
        keep: Callable[[], Awaitable[None]],
        counters: Counters,
        ended: Callable[[LiveTurn], None],
    ) -> None:
        """``keep`` makes durable that it was delivered. ``ended``: the turn is not on its way here any more."""
        self._turn = turn
        self._keep = keep
        self._ended = ended
        self._counters = counters
        self._is_over = False
        self.trace = ""
        """The id of the conversation that it belongs to, if any."""
        self.left_out: Sequence[str] = ()
        turn.deliveries.add(self)

    @property
    def id(self) -> str:
        return self._turn.id

    @property
    def created_at(self) -> int:
        return self._turn.entry.created_at

    @property
    def num_prompt_tokens(self) -> int:
        return self._turn.tokens.num_prompt

    async def __aiter__(self) -> AsyncIterator[Piece | Answer]:
        turn, told = self._turn, Piece()
        while True:
            changed = turn.changed
            if turn.refusal is not None:
                self.dropped()
                raise turn.refusal
            if turn.answer is not None:
                yield turn.answer
                return
            known = turn.certain()
            calls = tuple((call_id(self.id, place), call) for place, call in enumerate(known.calls))
            if known.text.startswith(told.text) and known.reasoning.startswith(told.reasoning):
                text, reasoning = known.text.removeprefix(told.text), known.reasoning.removeprefix(told.reasoning)
                more = Piece(text, reasoning, calls[len(told.calls) :])
                told = Piece(known.text, known.reasoning, calls)
                if more != Piece():
                    yield more
            await changed.wait()

    async def whole(self) -> Answer:
        turn = self._turn
        while turn.answer is None:
            if turn.refusal is not None:
                self.dropped()
                raise turn.refusal
            await turn.changed.wait()
        return turn.answer

    async def delivered(self) -> None:
        if not self._is_over:
            self._turn.entry.delivered, self._turn.entry.owed = True, False
            self._counters.add("answers/delivered")
            self._end()
            with contextlib.suppress(Refusal):  # the client has it all the same
                await self._keep()

    def dropped(self) -> None:
        if not self._is_over:
            self._counters.add("answers/undelivered")
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._turn.deliveries.discard(self)
        self._turn.tell()
        self._ended(self._turn)


@contextlib.asynccontextmanager
async def in_turn(deciding: Deciding, name: str) -> AsyncIterator[None]:
    lock, num_waiting = deciding.get(name) or (asyncio.Lock(), 0)
    deciding[name] = lock, num_waiting + 1
    try:
        async with lock:
            yield
    finally:
        lock, num_waiting = deciding.pop(name)
        if num_waiting > 1:
            deciding[name] = lock, num_waiting - 1
