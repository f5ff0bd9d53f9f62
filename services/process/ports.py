"""A free port for a server that is started later, in another process.

A port that the kernel chose may be given away again before the server binds it: to any socket that is bound to port 0
or connects somewhere. Those come from one range; these do not. Other searches pass over a port that was found: where
the kernel lets a server bind it nevertheless (Linux), the process that found it stays bound to it.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections import deque
from collections.abc import Collection
from pathlib import Path

_KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_ATTEMPTS = 200
# The oldest of more have their servers by now.
_MOST_HELD = 64
_held: deque[int] = deque()
"""Descriptors of sockets that are bound to the ports that were found."""


def free_port(host: str = "127.0.0.1") -> int:
    ceiling = _lowest_of_kernel()
    for _ in range(_ATTEMPTS if ceiling > _LOWEST + _ATTEMPTS else 0):
        port = random.SystemRandom().randrange(_LOWEST, ceiling)
        if _hold(host, port):
            return port
    with _socket_for(host) as probe:  # the kernel hands out nearly all ports of this machine
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def kept_port(file: Path, host: str = "127.0.0.1", *, but: Collection[int] = ()) -> int:
    """The port that ``file`` holds, if nothing listens there and ``but`` lacks it; else a free one, kept from now on.

    So a restarted server keeps its address, and clients do not take it for another one.
    """
    try:
        port = int(file.read_text())
    except (OSError, ValueError):
        port = 0
    if port in but or not 0 < port < 2**16 or not _can_bind_after_others(host, port):
        while (port := free_port(host)) in but:
            pass
        file.write_text(f"{port}\n")
    return port


def _lowest_of_kernel() -> int:
    """The first port that the kernel hands out by itself; 0 if unknown."""
    try:
        return int(_KERNEL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _hold(host: str, port: int) -> bool:
    """Whether it is free. On Linux it is then held for servers, which bind with ``SO_REUSEADDR``."""
    with _socket_for(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        if sys.platform == "linux":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
            _held.append(probe.detach())
    while len(_held) > _MOST_HELD:
        os.close(_held.popleft())
    return True


def _can_bind_after_others(host: str, port: int) -> bool:
    """Connections of an earlier server may still be dying there."""
    with _socket_for(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _socket_for(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
