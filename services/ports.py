"""A free port for a server that is started later, in another process.

A port that the kernel chose may be given away again before the server binds it: to any socket that is bound to port 0
or connects somewhere. Those come from one range; these do not.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_ATTEMPTS = 200


def free_port(host: str = "127.0.0.1") -> int:
    ceiling = _lowest_of_kernel()
    for _ in range(_ATTEMPTS if ceiling > _LOWEST + _ATTEMPTS else 0):
        port = random.SystemRandom().randrange(_LOWEST, ceiling)
        if _can_bind(host, port):
            return port
    with _socket_for(host) as probe:  # the kernel hands out nearly all ports of this machine
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _lowest_of_kernel() -> int:
    """The first port that the kernel hands out by itself; 0 where that is not known."""
    try:
        return int(_KERNEL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _can_bind(host: str, port: int) -> bool:
    with _socket_for(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _socket_for(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
