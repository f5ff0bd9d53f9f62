"""Leads a request by its key to the episode that is played here.

Rule: a key that is right but whose episode is not here (yet) waits for a bounded time, because another gateway may
have died a moment ago; then the client is told to ask again. What is over stays over. It decides nothing about turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from gspo_core.types import EpisodeKey
from services.gateway.episode import AgentEpisode
from services.gateway.keys import Keys, UnknownKey
from services.gateway.live import Delivery
from services.gateway.turns import Ask, Refusal, RefusalKind

T = TypeVar("T")

# Beyond these the oldest are forgotten; their agents are told to ask again instead of that it is over.
NUM_ENDED_KEPT = 65_536
# Clients give up a request without an answer after some minutes at the earliest.
PATIENCE_S = 20.0


class Door:
    """The ``Turns`` of the episodes of this process."""

    def __init__(
        self,
        keys: Keys,
        *,
        now: Callable[[], float],
        patience_s: float = PATIENCE_S,
        model_names: Sequence[str] = ("policy",),
    ) -> None:
        """``now``: Unix seconds."""
        self._keys = keys
        self._now = now
        self._patience_s = patience_s
        self._model_names = tuple(model_names)
        self._open: dict[EpisodeKey, tuple[int, AgentEpisode]] = {}
        self._ended: OrderedDict[EpisodeKey, int] = OrderedDict()
        """The last attempt of episodes that have their outcome."""
        self._opened = asyncio.Event()

    @contextlib.contextmanager
    def open(self, episode: AgentEpisode) -> Iterator[str]:
        """Lets requests in; gives the key for the agent."""
        key, attempt = episode.key, episode.attempt
        self._open[key] = (attempt, episode)
        self._opened.set()
        self._opened = asyncio.Event()
        try:
            yield self._keys.make(key, attempt, self._now())
        finally:
            if self._open.get(key) == (attempt, episode):
                del self._open[key]
            if episode.is_sealed:
                self._ended[key] = attempt
                if len(self._ended) > NUM_ENDED_KEPT:
                    self._ended.popitem(last=False)

    async def ask(self, key: str, ask: Ask) -> Delivery:
        episode = await self._episode(key)
        asking = asyncio.create_task(episode.ask(ask))
        try:
            await asyncio.wait({asking}, timeout=self._patience_s)
        finally:
            if not asking.done():  # it becomes a turn all the same, which the client's next try joins
                asking.add_done_callback(_drop)
        if not asking.done():
            raise Refusal(RefusalKind.AWAY, "this turn cannot be stored at the moment; ask again")
        return asking.result()

    async def count_tokens(self, key: str, ask: Ask) -> int:
        return (await self._episode(key)).count_tokens(ask)

    async def model_names(self, key: str) -> tuple[str, ...]:
        self._named(key)
        return self._model_names

    async def reward(self, key: str, value: float, *, turn: str = "", token: str = "") -> None:
        await (await self._episode(key)).reward(value, turn, token)

    async def finish(self, key: str) -> None:
        (await self._episode(key)).finish()

    def _named(self, key: str) -> tuple[EpisodeKey, int]:
        try:
            named = self._keys.read(key)
        except UnknownKey:
            raise Refusal(RefusalKind.UNKNOWN_KEY, "this key names no episode here") from None
        if named.expires_at < self._now():
            raise Refusal(RefusalKind.ENDED, "this key has expired")
        return named.episode, named.attempt

    async def _episode(self, key: str) -> AgentEpisode:
        episode, attempt = self._named(key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                while True:
                    opened = self._opened
                    held = self._open.get(episode)
                    newest = held[0] if held else self._ended.get(episode, -1)
                    if newest > attempt or (newest == attempt and not held):
                        raise Refusal(RefusalKind.ENDED, "this episode has ended, or began again with another key")
                    if held and newest == attempt:
                        return held[1]
                    await opened.wait()
        raise Refusal(RefusalKind.AWAY, "this episode is not here at the moment; ask again")


def _drop(asking: asyncio.Task[Delivery]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().dropped()
