"""Where a server stands, so that a process that starts there after its death is known as its successor.

Rule: at most one living process holds a place; the kernel sees to that and not a file, so the death of its holder frees
it, by whatever signal. A place is one address in one network namespace of one boot of a machine: a process that is
started again there by ``gspo up``, by systemd or in the same pod stands where its predecessor stood. Where the kernel
does not tell these things there is no place, and the dead are found by their leases alone. It sends nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from services.process.telemetry import get_logger

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@contextlib.contextmanager
def hold_place(kind: str, address: str) -> Iterator[str]:
    """The place of a server of this ``kind`` that listens on ``address``, HOST:PORT, held within the block.

    Empty where it is not known, or another living process holds it.
    """
    place = place_of(kind, address)
    fence = _fence(place) if place else None
    if fence is None:
        get_logger().info("without a place: a successor waits for the lease", kind=kind, address=address)
        yield ""
        return
    with fence:
        yield place


def place_of(kind: str, address: str) -> str:
    """Empty where it is not known."""
    if sys.platform != "linux" or address.endswith(":0"):
        return ""
    try:
        boot, network = _BOOT.read_text().strip(), os.readlink(_NETWORK)
    except OSError:
        return ""
    # The name of the machine too: copies of one virtual machine share the rest.
    return "/".join((kind, socket.gethostname(), boot, network, address))


def _fence(place: str) -> socket.socket | None:
    """A socket with a name of its own in the network namespace; None if another process has the name."""
    fence = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # It begins with a zero: a name without a file, which is gone with its socket.
        fence.bind(b"\0gspo/" + hashlib.sha256(place.encode()).hexdigest()[:32].encode())
    except OSError:
        fence.close()
        return None
    return fence
