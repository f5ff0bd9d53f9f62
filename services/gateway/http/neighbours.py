"""Which of several gateways holds an episode, and where that one is reached.

Rule: an address comes from the record that a gateway keeps of itself in Redis, and from nowhere else; what was found is
believed for a moment only, since episodes move. An episode that was erased is held by none, and that is said at once.
Whether a key is a right one is not judged here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gspo_core.types import EpisodeKey
from services.gateway.dialects.turns import ERASED, Refusal, RefusalKind
from services.state.fleet import Fleet
from services.state.queue import Bus

BELIEVED_S = 2.0
MAX_KNOWN = 4096


class Neighbours:
    def __init__(self, name: str, bus: Bus, fleet: Fleet, clock: Callable[[], float]) -> None:
        """``name``: of this gateway."""
        self._name = name
        self._bus = bus
        self._fleet = fleet
        self._clock = clock
        self._known: OrderedDict[EpisodeKey, tuple[float, str]] = OrderedDict()

    async def address_of(self, key: EpisodeKey) -> str:
        """The base URL of the other gateway that holds the episode; empty if none does. Raises ``Refusal``."""
        found_at, address = self._known.get(key, (0.0, ""))
        if not address or self._clock() - found_at > BELIEVED_S:
            address = await self._look(key)
            self._known[key] = self._clock(), address
            self._known.move_to_end(key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return address

    async def is_over(self, key: EpisodeKey) -> bool:
        """No gateway will ever hold it (again)."""
        return await self._bus.is_over(key)

    def forget(self, key: EpisodeKey) -> None:
        """It did not answer there."""
        self._known.pop(key, None)

    async def _look(self, key: EpisodeKey) -> str:
        holder = await self._bus.holder(key)
        if not holder and await self._bus.was_erased(key):
            raise Refusal(RefusalKind.ENDED, ERASED)
        if not holder or holder == self._name:
            return ""
        record = await self._fleet.worker(holder)
        return "" if record is None or record.kind != "gateway" else record.address
