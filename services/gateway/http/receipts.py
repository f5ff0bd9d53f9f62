"""Answers that another gateway hands to the client: open until it says whether the client has them.

Rule: a turn counts as delivered when the client has it, not when a neighbour does. A neighbour that says nothing has
not delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from services.gateway.dialects.turns import Answer, Answering, Piece

PATIENCE_S = 30.0


class Receipts:
    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._open: dict[tuple[str, str], list[Answering]] = {}
        """By key and turn; a turn may be given to several clients at once."""

    def through_a_neighbour(self, key: str, answering: Answering) -> Forwarded:
        return Forwarded(self, key, answering)

    def hold(self, key: str, answering: Answering) -> None:
        self._open.setdefault((key, answering.id), []).append(answering)
        asyncio.get_running_loop().call_later(self._patience_s, self._give_up, key, answering)

    async def settle(self, key: str, turn: str, *, is_delivered: bool) -> None:
        """Harmless for a turn that is not open (any more)."""
        held = self._open.get((key, turn))
        if held:
            answering = held[0]
            self._remove(key, answering)
            if is_delivered:
                await answering.delivered()
            answering.dropped()

    def _give_up(self, key: str, answering: Answering) -> None:
        self._remove(key, answering)
        answering.dropped()  # which says nothing of one that was delivered

    def _remove(self, key: str, answering: Answering) -> None:
        held = self._open.get((key, answering.id), [])
        if answering in held:
            held.remove(answering)
        if not held:
            self._open.pop((key, answering.id), None)


class Forwarded:
    """An ``Answering`` whose client is behind a neighbour."""

    def __init__(self, receipts: Receipts, key: str, answering: Answering) -> None:
        self._receipts = receipts
        self._key = key
        self._answering = answering
        self._is_handed_on = False

    @property
    def id(self) -> str:
        return self._answering.id

    @property
    def created_at(self) -> int:
        return self._answering.created_at

    @property
    def num_prompt_tokens(self) -> int:
        return self._answering.num_prompt_tokens

    @property
    def trace(self) -> str:
        return self._answering.trace

    @property
    def left_out(self) -> Sequence[str]:
        return self._answering.left_out

    def __aiter__(self) -> AsyncIterator[Piece | Answer]:
        return aiter(self._answering)

    async def whole(self) -> Answer:
        return await self._answering.whole()

    async def delivered(self) -> None:
        self._is_handed_on = True
        self._receipts.hold(self._key, self._answering)

    def dropped(self) -> None:
        if not self._is_handed_on:
            self._answering.dropped()
