"""Leads a request to what its key is for: an episode, or a conversation without one."""

from __future__ import annotations

from services.gateway.dialects.turns import Answering, TurnRequest, Turns
from services.state.talks import PREFIX


class Entrances:
    """The ``Turns`` of a gateway."""

    def __init__(self, episodes: Turns, talks: Turns) -> None:
        self._episodes = episodes
        self._talks = talks

    async def ask(self, key: str, ask: TurnRequest) -> Answering:
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
        return self._talks if key.startswith(PREFIX) else self._episodes
