"""URLs that a caller has written into the config of an environment, whatever its class does with them.

Rule: what looks like an address of the web is one, at any depth and under any name; each host is judged once, and so
many hosts that judging them would be an attack of its own are refused. It connects to nothing and knows no class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from gspo_core.outbound import AddressRefused, Network, check_url

MAX_HOSTS = 32
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


def check_urls(config: Any, networks: Sequence[Network]) -> None:
    """Raises AddressNamed. It may ask a resolver: call it in a thread."""
    judged: set[str] = set()
    for where, url in urls_in(config):
        host = _HOST.match(url)
        if host is not None and host[0] in judged:
            continue
        if len(judged) == MAX_HOSTS:
            raise AddressNamed(where, f"at most {MAX_HOSTS} different hosts are named in one config")
        try:
            check_url(url, networks)
        except AddressRefused as error:
            raise AddressNamed(where, str(error)) from None
        judged.add(host[0] if host is not None else url)


class AddressNamed(AddressRefused):
    """It stands at ``where``."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where
