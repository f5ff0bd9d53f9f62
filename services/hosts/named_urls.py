"""URLs that a caller has written into the config of an environment, whatever its class does with them.

Rule: what looks like an address of the web is one, at any depth and under any name; each host is judged once, and so
many hosts, or such slow ones, that judging them would be an attack of its own are refused. It connects to nothing and
knows no class.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gspo_core.outbound import AddressRefused, Network, check_url

MAX_HOSTS = 32
# A resolver that does not answer holds up whoever asks it, and everybody who waits for the same thread.
MAX_JUDGING_S = 15.0
# Texts that go on after a blank are sentences, which begin with an address now and then.
_URL = re.compile(r"\s*((https?|wss?):\S*)\s*", re.IGNORECASE)
_HOST = re.compile(r"[^/?#]*//[^/?#]*")


def urls_in(value: Any, where: str = "config") -> Iterator[tuple[str, str]]:
    """Each with the place where it stands: ``config.servers[0].url``."""
    match value:
        case str():
            if found := _URL.fullmatch(value):
                yield where, found[1]
        case dict():
            for name, item in value.items():
                yield from urls_in(item, f"{where}.{name}")
        case list() | tuple():
            for index, item in enumerate(value):
                yield from urls_in(item, f"{where}[{index}]")


class Share:
    """What one request may ask of a resolver: ``clock`` counts its seconds from now on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + MAX_JUDGING_S
        self.judged: set[str] = set()

    def require_room(self, where: str) -> None:
        """Raises AddressNamed."""
        if len(self.judged) == MAX_HOSTS:
            raise AddressNamed(where, f"at most {MAX_HOSTS} different hosts are named at once")
        if self.judged and self._clock() > self._until:
            raise AddressNamed(where, "the names before this one took too long to resolve")


def check_urls(config: Any, networks: Sequence[Network], share: Share | None = None) -> None:
    """Raises AddressNamed. It may ask a resolver: call it in a thread. ``share``: of several configs together."""
    share = share or Share()
    for where, url in urls_in(config):
        host = _HOST.match(url)
        name = host[0] if host is not None else url
        if name in share.judged:
            continue
        share.require_room(where)
        try:
            check_url(url, networks)
        except AddressRefused as error:
            raise AddressNamed(where, str(error)) from None
        share.judged.add(name)


class AddressNamed(AddressRefused):
    """It stands at ``where``."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
