"""The keys of engines: which one a process shows to an engine, and which ones an engine asks for.

Rule: the most specific entry decides (``HOST:PORT``, then ``HOST``, then ``*``), for use and for control separately. A
key is never part of a text, a log line or an argument; where one is missing or wrong, the words here say what to do.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import httpx
from pydantic import SecretStr

SETTING = "GSPO_ENGINE_KEYS"
ADMIN = "admin@"
ANY = "*"
LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


class KeyPair(NamedTuple):
    """None: there is none. An engine without a key of its own for control takes the other one."""

    use: str | None = None
    control: str | None = None

    def shown(self, *, for_control: bool) -> str | None:
        return self.control or self.use if for_control else self.use


class NoKeyForEngine(ValueError):
    """There are keys, and none is for the engine that asks: it must not start without one."""


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """By place: ``HOST:PORT``, ``HOST`` or ``*``."""

    _use: Mapping[str, str] = field(default_factory=dict, repr=False)
    _control: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, entries: Iterable[SecretStr]) -> EngineKeys:
        """``PLACE=KEY`` and ``admin@PLACE=KEY``, as the setting has checked them."""
        use: dict[str, str] = {}
        control: dict[str, str] = {}
        for entry in entries:
            place, _, key = entry.get_secret_value().partition("=")
            (control if place.startswith(ADMIN) else use)[place.removeprefix(ADMIN).lower()] = key
        return cls(use, control)

    def for_engine(self, url: str) -> KeyPair:
        """What to show to the engine at ``url``, which may name a kind."""
        host, port = _place(url)
        places = (f"{host}:{port}", host, ANY)
        return KeyPair(_first(self._use, places), _first(self._control, places))

    def of_engine(self, names: Collection[str], port: int) -> KeyPair:
        """What an engine that is known by ``names`` asks for. Raises NoKeyForEngine: there are keys, and none fits."""
        places = [*(f"{name.lower()}:{port}" for name in names), *(name.lower() for name in names), ANY]
        found = KeyPair(_first(self._use, places), _first(self._control, places))
        if (self._use or self._control) and found == KeyPair():
            known = ", ".join(places)
            raise NoKeyForEngine(f"{SETTING} has no key for this engine: add one for any of {known}, or unset it")
        return found


NO_KEYS = EngineKeys()


def refusal(url: str, *, control: bool) -> str:
    """What to do about an engine that answered 401."""
    what = "control calls" if control else "requests"
    entry = f"{ADMIN if control else ''}{':'.join(map(str, _place(url)))}=KEY"
    why = " (the key that the engine was started with for administration)" if control else ""
    return f"{url} refuses our {what}: it asks for another key. Set {SETTING}={entry} for this process{why}"


def is_routable(url: str) -> bool:
    """Whether other machines may reach it."""
    host, _ = _place(url)
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host not in LOOPBACK_NAMES


def warning(url: str) -> str:
    return (
        f"{url} takes control calls without a key: whoever reaches it can change its weights. Start it with a key "
        f"and name that in {SETTING}"
    )


def _place(url: str) -> tuple[str, int]:
    scheme, _, rest = url.rpartition("://")
    parsed = httpx.URL(f"{scheme.rpartition('+')[2]}://{rest}")
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    return host.lower(), parsed.port or (443 if parsed.scheme == "https" else 80)


def _first(keys: Mapping[str, str], places: Iterable[str]) -> str | None:
    return next((keys[place] for place in places if place in keys), None)
