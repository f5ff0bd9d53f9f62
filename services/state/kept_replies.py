"""Keeps replies for a while, so that a resent request gets the first reply instead of repeating the work.

The rule: one caller at a time does the work under a name, and none does it again once its reply is kept; a caller that
falls silent midway loses it after a while. Number, bytes and age of kept replies are bounded
(`lua/replies.lua`). It does not know HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.state.client import RedisClient
from services.state.functions import Functions
from services.state.keys import service_keys

KEPT_S = 24 * 3600.0
LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class Begun:
    """Work that another caller began or finished under the same name."""

    request: str
    """Digest of that request."""
    reply: bytes | None
    """None: still in progress."""


class KeptReplies:
    """``now`` is in seconds, and nearly equal on all processes: one that is ``LEASE_S`` ahead never waits."""

    def __init__(self, redis: RedisClient, now: Callable[[], float] = time.time) -> None:
        self._functions = Functions(redis)
        self._keys = service_keys()
        self._now = now

    async def begin(self, name: str, request: str, owner: str) -> Begun | None:
        """None: do the work, calling ``renew`` meanwhile, then ``keep`` the reply or ``drop`` the name."""
        now = self._now()
        times = (_ms(now), _ms(now + LEASE_S), _ms(now - KEPT_S))
        held = await self._functions.call("begin_reply", self._keys, name, request, owner, *times)
        return Begun(held[0].decode(), held[1] or None) if held else None

    async def renew(self, name: str, owner: str) -> None:
        now = self._now()
        await self._functions.call("renew_reply", self._keys, name, owner, _ms(now), _ms(now + LEASE_S))

    async def keep(self, name: str, request: str, owner: str, reply: bytes) -> None:
        await self._functions.call("keep_reply", self._keys, name, request, owner, _ms(self._now()), reply)

    async def drop(self, name: str, owner: str) -> None:
        await self._functions.call("drop_reply", self._keys, name, owner)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
