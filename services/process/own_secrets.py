"""Hides the secrets in a service's environment from other processes that can look at it.

Rule: a service and its children go on as before, but ``/proc/PID/environ`` tells no secret from then on, and another
process of the same account cannot look into the service's memory. Root can: against that only a wall helps.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

# Ours, and those of others that a service is given: of a hub, a cloud, a tracker.
_SECRET = re.compile(rb"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|REDIS_URL", re.IGNORECASE)
# In /proc/self/stat, counted from what follows the name.
_BEGIN, _END = 47, 48
_PR_SET_DUMPABLE = 4


def hide_secrets() -> None:
    """From ``/proc/PID/environ`` of this process."""
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    begin, end = int(fields[_BEGIN]), int(fields[_END])
    position = begin
    for entry in ctypes.string_at(begin, end - begin).split(b"\0"):
        name, _, value = entry.partition(b"=")
        if value and _SECRET.search(name):
            _keep_for_children(os.fsdecode(name))
            ctypes.memset(position + len(name) + 1, 0, len(value))
        position += len(entry) + 1


def _keep_for_children(name: str) -> None:
    """A copy elsewhere, for those that inherit the environment as the C library has it."""
    if (value := os.environ.get(name)) is not None:
        os.putenv(name, value)


def refuse_inspection() -> None:
    """By other processes of the same account: no tracing, no reading of memory, no core file."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
