"""Leads a request by its key to what it is for: the episode that is played here, or a conversation without one.

Rule: a key that is right but whose episode is not here (yet) waits for a bounded time, because another gateway may
have died a moment ago; then the client is told to ask again. What is over stays over. It decides nothing about turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeVar

from gspo_core.types import EpisodeKey
from services.episodes.keys import AttemptId, Keys, Named, UnknownKey
from services.gateway.agent.episode import AgentEpisode
from services.gateway.agent.live import Delivery
from services.gateway.agent.rewards import LateRewards
from services.gateway.dialects.turns import OVER, PendingAnswer, Refusal, RefusalKind, TurnRequest, Turns
from services.process.cancelling import cancel_all
from services.state.queue_records import RewardWord
from services.state.talks import PREFIX as TALK_PREFIX

T = TypeVar("T")

# Beyond these the oldest are forgotten; their agents are told to ask again instead of that it is over.
NUM_ENDED_KEPT = 65_536
# What right keys name; wrong ones are read anew.
NUM_KEYS_KEPT = 4096
# Clients give up a request without an answer after some minutes at the earliest.
PATIENCE_S = 20.0
# A reward that comes in the moment in which its episode ends waits for that.
REWARD_POLL_S = 0.2
NONE = AttemptId(-1, -1)


class Entrances:
    """The ``Turns`` of a gateway."""

    def __init__(self, episodes: Turns, talks: Turns) -> None:
        self._episodes = episodes
        self._talks = talks

    async def ask(self, key: str, ask: TurnRequest) -> PendingAnswer:
        return await self._of(key).ask(key, ask)

    async def count_tokens(self, key: str, ask: TurnRequest) -> int:
        return await self._of(key).count_tokens(key, ask)

    async def model_names(self, key: str) -> tuple[str, ...]:
        return await self._of(key).model_names(key)

    async def reward(self, key: str, value: float, *, turn: str = "", token: str = "") -> None:
        await self._of(key).reward(key, value, turn=turn, token=token)

    async def finish(self, key: str) -> None:
        await self._of(key).finish(key)

    def _of(self, key: str) -> Turns:
        return self._talks if key.startswith(TALK_PREFIX) else self._episodes


class EpisodeRouter:
    """The ``Turns`` of the episodes of this process."""

    def __init__(
        self,
        keys: Keys,
        *,
        now: Callable[[], float],
        patience_s: float = PATIENCE_S,
        model_names: Sequence[str] = ("policy",),
        leaving: asyncio.Event | None = None,
    ) -> None:
        """``now``: Unix seconds. ``leaving``: once it is set, nobody waits for an episode to come here."""
        # Each request is asked for it several times.
        self._read_key = lru_cache(maxsize=NUM_KEYS_KEPT)(keys.read)
        self._keys = keys
        self._now = now
        self._patience_s = patience_s
        self._leaving = leaving or asyncio.Event()
        self._model_names = tuple(model_names)
        self._open: dict[EpisodeKey, tuple[AttemptId, AgentEpisode]] = {}
        self._ended: OrderedDict[EpisodeKey, AttemptId] = OrderedDict()
        """The last attempt of episodes that have their outcome, or were erased."""
        self._opened = asyncio.Event()
        self.late: LateRewards | None = None
        """Takes rewards for episodes that are not played here (any more)."""

    @contextlib.contextmanager
    def open(self, episode: AgentEpisode, reward_deadline_s: float = 0.0) -> Iterator[str]:
        """Lets requests in; gives the key for the agent, by which a reward may come so long after its end."""
        key, attempt = episode.key, episode.named
        self._open[key] = (attempt, episode)
        self._opened.set()
        self._opened = asyncio.Event()
        try:
            yield self._keys.make(key, attempt, self._now(), reward_deadline_s)
        finally:
            if self._open.get(key) == (attempt, episode):
                del self._open[key]
            if episode.is_sealed or episode.is_erased:
                self._ended[key] = attempt
                if len(self._ended) > NUM_ENDED_KEPT:
                    self._ended.popitem(last=False)

    def paying(self, key: str) -> str:
        """The key by which the episode of ``key`` is paid."""
        return self._keys.paying(key)

    async def ask(self, key: str, ask: TurnRequest) -> Delivery:
        return await (await self._episode(key)).ask(ask)

    async def count_tokens(self, key: str, ask: TurnRequest) -> int:
        return await (await self._episode(key)).count_tokens(ask)

    async def model_names(self, key: str) -> tuple[str, ...]:
        """Also refuses what is known to be over: it is asked before a body is read."""
        episode, attempt = self._named(key)
        self._held(episode, attempt)
        return self._model_names

    async def reward(self, key: str, value: float, *, turn: str = "", token: str = "") -> None:
        named = self._checked(key)
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience_s
        # What takes the reward is never cut off in the middle: one that was taken would be posted again.
        while not await self._take_reward(named, value, turn, token):
            if (left_s := until - clock()) <= 0:
                raise Refusal(RefusalKind.AWAY, "this episode is not here at the moment; ask again")
            await asyncio.sleep(min(left_s, REWARD_POLL_S))

    async def _take_reward(self, named: Named, value: float, turn: str, token: str) -> bool:
        """False while it is neither played here nor waits for a reward."""
        key, attempt = named.episode, named.attempt
        held_attempt, held = self._open.get(key, (NONE, None))
        if held is not None and held_attempt == attempt and not held.is_sealed:
            try:
                await held.reward(value, turn, token, pays=named.pays)
            except Refusal as refusal:
                if refusal.kind is not RefusalKind.ENDED or self.late is None:
                    raise
                return False  # it was sealed in this moment
            return True
        if self.late is not None:
            return await self.late.post(named, value, turn, token) is RewardWord.TAKEN
        if max(held_attempt, self._ended.get(key, NONE)) >= attempt:
            raise Refusal(RefusalKind.ENDED, OVER)
        return False

    async def finish(self, key: str) -> None:
        await (await self._episode(key)).finish()

    def absent(self, key: str) -> EpisodeKey | None:
        """The episode of a right key that is not here, nor has ended here. Raises ``Refusal`` where it is none."""
        named = self._checked(key)
        episode, attempt = named.episode, named.attempt
        held = self._open.get(episode)
        newest = held[0] if held else self._ended.get(episode, NONE)
        return episode if newest < attempt else None

    def _named(self, key: str) -> tuple[EpisodeKey, AttemptId]:
        named = self._checked(key)
        if named.pays:
            raise Refusal(RefusalKind.UNKNOWN_KEY, "this key is for rewards alone")
        return named.episode, named.attempt

    def _checked(self, key: str) -> Named:
        try:
            named = self._read_key(key)
        except UnknownKey:
            raise Refusal(RefusalKind.UNKNOWN_KEY, "this key names no episode here") from None
        if named.expires_at < self._now():
            raise Refusal(RefusalKind.ENDED, "this key has expired")
        return named

    def _held(self, episode: EpisodeKey, attempt: AttemptId) -> AgentEpisode | None:
        """None where it is not here (yet). Raises ``Refusal`` where it is over."""
        held = self._open.get(episode)
        newest = held[0] if held else self._ended.get(episode, NONE)
        if newest > attempt or (newest == attempt and not held):
            raise Refusal(RefusalKind.ENDED, OVER)
        return held[1] if held and newest == attempt else None

    async def _episode(self, key: str) -> AgentEpisode:
        episode, attempt = self._named(key)
        if (held := self._held(episode, attempt)) is not None:
            return held
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                while True:
                    opened = self._opened
                    if (held := self._held(episode, attempt)) is not None:
                        return held
                    if self._leaving.is_set():
                        break
                    await first_of(opened, self._leaving)
        raise Refusal(RefusalKind.AWAY, "this episode is not here at the moment; ask again")


async def first_of(*events: asyncio.Event) -> None:
    """Waits until one of them is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(waiting)
