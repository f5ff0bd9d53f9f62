"""The account that a service runs under, where that is root: said once it works, since nothing of it is given up.

Rule: only what runs code of others becomes somebody else (the hosts behind a wall). A service stays what it was started
as: data directory, logs and sockets belong to that account, and to change it half-way would leave them to two.
"""

from __future__ import annotations

import os
from functools import cache

from services.process.telemetry import get_logger

ADVICE = (
    "whoever gets the better of a service that is root has the machine, and where there is no wall every environment "
    "is root as well: start it as an account of its own (docs/security.md)"
)


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


@cache
def tell_of_root() -> None:
    """Once for a process, when it has begun to serve: who cannot begin says why, and nothing else."""
    if is_root():
        get_logger().warning("this service runs as root", advice=ADVICE)
