"""A listening socket, of a server or of a parent that starts one and outlives it.

Rule: where an address cannot be had, the error names the settings that gave it. It accepts nothing.
"""

from __future__ import annotations

import os
import socket

from services.process.settings import SettingsError

_BACKLOG = 512


def listen(host: str, port: int, settings: str) -> socket.socket:
    """``settings`` names those that gave the address. Raises ``SettingsError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsError(f"cannot listen on {host}:{port} ({settings}): {reason}") from None
    # Connections inherit it; asyncio does not set it for them, since this socket has no protocol number. Without it the
    # body of an answer waits for the acknowledgement of its head: 40 ms on a kept-alive connection.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
