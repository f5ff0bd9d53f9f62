"""Slows down callers that show wrong keys: by address, and by the beginning of the key.

Rule: memory is bounded, and nothing of a key is kept but digests. A right key that cannot be guessed, or was right
before, gets in whatever others behind the same proxy do; a short, new one has to wait, and is told so.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

# Enough for a typing error, or for a program that still has yesterday's key.
FREE_ATTEMPTS = 20.0
ATTEMPTS_PER_S = 0.5
MAX_KEPT = 8192
# A key of so many characters cannot be found by trying; keys that the service makes have 61.
UNGUESSABLE_CHARS = 32
_PREFIX_CHARS = 8

Digest = bytes
Value = TypeVar("Value")


class Brakes:
    def __init__(
        self, clock: Callable[[], float], *, attempts: float = FREE_ATTEMPTS, per_s: float = ATTEMPTS_PER_S
    ) -> None:
        self._clock = clock
        self._attempts = attempts
        self._per_s = per_s
        # The one that was wrong longest ago is first.
        self._wrong: OrderedDict[Digest, tuple[float, float]] = OrderedDict()
        self._right: OrderedDict[Digest, None] = OrderedDict()

    def wait_s(self, address: str, key: str) -> int:
        """0: the key may be looked at; else the seconds until one more may be."""
        if not self._wrong:
            return 0
        now = self._clock()
        waits = [(1.0 - self._level(one, now)) / self._per_s for one in _sources(address, key)]
        return max(0, math.ceil(max(waits)))

    def is_above_suspicion(self, key: str) -> bool:
        """A key that may be looked at whatever came from its address."""
        return len(key) >= UNGUESSABLE_CHARS or _digest("right", key) in self._right

    def was_right(self, key: str) -> None:
        if len(key) < UNGUESSABLE_CHARS:
            _keep(self._right, _digest("right", key), None)

    def was_wrong(self, address: str, key: str) -> None:
        now = self._clock()
        for one in _sources(address, key):
            _keep(self._wrong, one, (max(0.0, self._level(one, now) - 1.0), now))

    def _level(self, source: Digest, now: float) -> float:
        level, since = self._wrong.get(source, (self._attempts, now))
        return min(self._attempts, level + (now - since) * self._per_s)


def _keep(kept: OrderedDict[Digest, Value], name: Digest, value: Value) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > MAX_KEPT:
        kept.popitem(last=False)


def _sources(address: str, key: str) -> Sequence[Digest]:
    """What a wrong key is held against."""
    begins, _, secret = key.rpartition("_")
    return _digest("from", _network(address)), _digest("like", begins if begins and secret else key[:_PREFIX_CHARS])


def _network(address: str) -> str:
    """The owner of one IPv6 address has the 2 ** 64 beside it."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)


def _digest(kind: str, text: str) -> Digest:
    return hashlib.sha256(f"{kind} {text}".encode("utf-8", "surrogateescape")).digest()[:16]
