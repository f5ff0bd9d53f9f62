"""Which addresses may be connected to on behalf of a URL from outside.

Rule: what is judged is the address, never the text that led to it. ``check_url`` resolves a name and refuses it if any
of its addresses is not public; ``guard_connections`` judges every address in the moment in which a socket is connected
to it, so neither a second answer of a resolver, nor a redirect, nor an odd spelling gets past it. It sends nothing.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Iterable[str]]
"""The addresses of a name."""

SECURE, PLAIN = frozenset({"https", "wss"}), frozenset({"http", "ws"})
PORTS = frozenset({80, 443, 8000, 8080, 8443})
_DEFAULT_PORTS = {"https": 443, "wss": 443, "http": 80, "ws": 80}
MAX_URL_CHARS = 2048
# What is assigned of IPv6; all else is reserved, local, or leads elsewhere.
_ASSIGNED = ipaddress.ip_network("2000::/3")
# Ranges that lead elsewhere (translated and tunnelled addresses, protocol assignments) and that the standard library
# calls global in one release or another.
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96", "fec0::/10"),
        *("192.0.0.0/24", "192.88.99.0/24"),
        # Public by its number, but in one large cloud the host itself answers there.
        "168.63.129.16/32",
    )
)


class AddressRefused(PermissionError):
    """An address, or a URL, that must not be connected to."""


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Raises ValueError."""
    return tuple(ipaddress.ip_network(text) for text in texts)


def is_public(text: str) -> bool:
    """Whether an address belongs to the public network and to nothing that is reached through it."""
    address = _address(text)
    if any(address.version == network.version and address in network for network in _NEVER):
        return False
    if address.version == 6 and address not in _ASSIGNED:
        return False
    return address.is_global and not address.is_multicast


def is_allowed(text: str, networks: Sequence[Network]) -> bool:
    """Public, or in a network that the operator has listed."""
    return _is_listed(text, networks) or is_public(text)


def check_url(url: str, networks: Sequence[Network], resolve: Resolve | None = None) -> None:
    """Raises AddressRefused. Plain text (http, ws) and other ports only reach networks that the operator has listed."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressRefused(f"this is not a URL: {error}") from None
    if len(url) > MAX_URL_CHARS or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise AddressRefused(f"a URL may have at most {MAX_URL_CHARS} characters and no spaces")
    if parts.scheme not in SECURE | PLAIN:
        raise AddressRefused(f"the URL scheme {parts.scheme or 'nothing'!r} is not supported here; use https or wss")
    if parts.username is not None or parts.password is not None:
        raise AddressRefused("a URL must not contain a user or a password")
    if not parts.hostname:
        raise AddressRefused("the URL has no host")
    port = port if port is not None else _DEFAULT_PORTS[parts.scheme]
    addresses = _resolved(parts.hostname, port, resolve or _system)
    if all(_is_listed(one, networks) for one in addresses):
        return
    if not all(is_allowed(one, networks) for one in addresses):
        raise AddressRefused(
            f"{parts.hostname} resolves to an address that is not public; an operator can allow networks"
        )
    if parts.scheme in PLAIN:
        raise AddressRefused(
            f"{parts.scheme} is only allowed in networks that the operator has listed; use https or wss"
        )
    if port not in PORTS:
        raise AddressRefused(f"port {port} is not one of {', '.join(map(str, sorted(PORTS)))}")


def guard_connections(networks: Sequence[Network]) -> None:
    """From now on this process connects to allowed addresses only. It cannot be taken back."""

    def judge(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            target = arguments[1]
            # Other families (unix sockets) are not reached by URLs.
            if isinstance(target, tuple) and not _may_connect(str(target[0]), networks):
                raise AddressRefused(f"connections to {str(target[0])[:60]} are not allowed for this environment")

    sys.addaudithook(judge)


def _may_connect(host: str, networks: Sequence[Network]) -> bool:
    try:
        return is_allowed(host, networks)
    except ValueError:  # a name: it is resolved before the connection, and that address is judged
        return False


def _is_listed(text: str, networks: Sequence[Network]) -> bool:
    address = _address(text)
    return any(address.version == network.version and address in network for network in networks)


def _address(text: str) -> Address:
    """An IPv4 address that is written as an IPv6 one is what it stands for. Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _resolved(host: str, port: int, resolve: Resolve) -> list[str]:
    try:
        found = list(resolve(host, port))
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise AddressRefused(f"{host} cannot be resolved")
    return found


def _system(host: str, port: int) -> Iterable[str]:
    return {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
