"""What one process saw of the engines, shared with all processes, so that not each of them asks every engine.

Rule: only the holder of the watch writes; it is taken over from a holder whose beats stand still, by a compare and set
on them. Readers wait for news instead of polling. A sighting names the report of the engine's trainer that was known
when it was made, which tells the older of the two. Nothing here speaks to an engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from services.state.fleet import NEWS_KEPT
from services.state.functions import Functions
from services.state.keys import service_key, service_keys
from services.state.leases import BeatWatch

# Another process takes over within twice this time.
WATCH_LEASE_S = 2.0
UNKNOWN = "?"
_SIGHTINGS, _NEWS, _WATCH = (service_key(f"engine_{name}") for name in ("sightings", "news", "watch"))


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as the watching process saw it last."""

    number: int
    """Counts this watcher's looks: another number is a newer look."""
    label: str = ""
    """Its name for its weights; empty if it did not answer."""
    answered: bool = False
    reported: str = ""
    """The label in its trainer's report that was known before this look."""
    load_number: int = 0
    """Counts looks at its load."""
    num_running: int = 0
    num_waiting: int = 0
    load_age_s: float = 0.0


class EngineSightings:
    """One for each table of engines."""

    def __init__(self, functions: Functions, clock: Callable[[], float]) -> None:
        self._functions = functions
        self._redis: Any = functions.redis
        self._token = uuid.uuid4().hex
        self._beats = BeatWatch(WATCH_LEASE_S, clock)
        self._position = "$"

    async def hold(self) -> bool:
        """Whether this process looks at the engines for all from now on. Ask every half of a lease."""
        fields = await self._redis.hmget(_WATCH, ["token", "beats"])
        token, beats = (value.decode() if value else "" for value in fields)
        is_over = bool(token) and token != self._token and self._beats.stands_still(_WATCH, (token, beats))
        if token and token != self._token and not is_over:
            return False
        held, _ = await self._functions.call(
            "hold_engine_watch", service_keys(), self._token, token if is_over else "", beats if is_over else ""
        )
        return bool(held.decode() == self._token)

    async def leave(self) -> None:
        """Another process may look at them now."""
        await self._functions.call("leave_engine_watch", service_keys(), self._token)

    async def write(self, seen: Mapping[str, Sighting], gone: Collection[str]) -> bool:
        """Tells all. False: another process looks at the engines now."""
        texts = {url: msgspec.json.encode(one) for url, one in seen.items()} | dict.fromkeys(gone, b"")
        pairs = [part for url, text in texts.items() for part in (url, text)]
        return bool(await self._functions.call("sight_engines", service_keys(), self._token, *pairs))

    async def all(self) -> dict[str, Sighting]:
        """By address. One that cannot be read counts as none."""
        found = {}
        for url, text in (await self._redis.hgetall(_SIGHTINGS)).items():
            try:
                found[url.decode()] = msgspec.json.decode(text, type=Sighting)
            except msgspec.DecodeError:
                continue
        return found

    async def news(self, at_most_s: float) -> set[str]:
        """Engines of which something has changed since the last call, "" for sightings; none after ``at_most_s``.

        ``UNKNOWN`` is among them when older news may have been dropped.
        """
        reply = await self._redis.xread({_NEWS: self._position}, count=None, block=max(1, int(at_most_s * 1000)))
        if reply:
            self._position = reply[0][1][-1][0]
        elif self._position == "$":
            self._position = await self._last_position()
        entries = reply[0][1] if reply else []
        names = {fields[b"e"].decode() for _, fields in entries}
        return names | {UNKNOWN} if len(entries) >= NEWS_KEPT else names

    async def _last_position(self) -> str:
        entries = await self._redis.xrevrange(_NEWS, count=1)
        return entries[0][0] if entries else "0"
