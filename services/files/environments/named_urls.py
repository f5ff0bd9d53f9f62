"""Finds and judges the URLs in the config of an environment, whatever its class does with them.

Rule: any text that looks like a web address counts, at any depth and under any name. Each host is judged once. So many
hosts, or such slow ones, that judging them would be an attack in itself are refused. It connects to nothing and knows
no class.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gspo_core.json_value import JSON
from gspo_core.outbound import AddressRefused, Network, check_url

MAX_HOSTS = 32
# A resolver that does not answer holds up its caller and everything else that waits for the thread.
MAX_JUDGING_S = 15.0
# A text that goes on after a blank is a sentence that merely begins with an address.
_URL = re.compile(r"\s*((https?|wss?):\S*)\s*", re.IGNORECASE)
_HOST = re.compile(r"[^/?#]*//[^/?#]*")


def urls_in(value: JSON | Mapping[str, JSON], where: str = "config") -> Iterator[tuple[str, str]]:
    """Each with its place, for example ``config.servers[0].url``."""
    match value:
        case str():
            if found := _URL.fullmatch(value):
                yield where, found[1]
        case Mapping():
            for name, item in value.items():
                yield from urls_in(item, f"{where}.{name}")
        case list() | tuple():
            for index, item in enumerate(value):
                yield from urls_in(item, f"{where}[{index}]")


class ResolverShare:
    """The share of the resolver that one request may use; its time starts now."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + MAX_JUDGING_S
        self.judged: set[str] = set()

    def require_room(self, where: str) -> None:
        """Raises AddressNamed."""
        if len(self.judged) == MAX_HOSTS:
            raise AddressNamed(where, f"at most {MAX_HOSTS} different hosts may be named at once")
        if self.judged and self._clock() > self._until:
            raise AddressNamed(where, "the names before this one took too long to resolve")


def check_urls(
    config: JSON | Mapping[str, JSON], networks: Sequence[Network], share: ResolverShare | None = None
) -> None:
    """Raises AddressNamed. It may ask a resolver: call it in a thread. Configs judged together have one ``share``."""
    share = share or ResolverShare()
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
    """A refused address; ``where`` is its place in the config."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
