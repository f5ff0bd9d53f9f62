"""The folder for a host's temporary files: locked while the host lives, so that a host after it may remove it.

Host and starter remove it themselves. If both are killed at once, the next host of the machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path

# Hosts of release 0.2.0 do not lock theirs, and call them otherwise: those stay untouched.
PREFIX = "gspo-scratch-"


def new_path(parent: str | None = None) -> Path:
    """Where a host is going to make its folder; for a walled host, ``parent`` is a folder behind its wall."""
    return Path(parent or tempfile.gettempdir()) / f"{PREFIX}{uuid.uuid4().hex}"


def make(path: str) -> int:
    """The descriptor whose lock keeps it: it is released by closing it, at the latest at the end of the process."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700)
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # swept before it was opened
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        os.close(lock)  # it was swept before it was locked


def sweep(parent: Path) -> None:
    """Removes those whose hosts are gone."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, gone meanwhile, or not ours
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
