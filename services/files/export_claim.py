"""Which process writes an export, and why the last try failed: files beside it that every API process can read.

Rule: a claim is a file that its holder touches every ``BEAT_S``; one that was not touched for ``STALE_S`` is free. Two
processes that take the same stale claim in one instant may both hold it: the directory that they write appears once.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

BEAT_S = 5.0
STALE_S = 30.0
MOST_CHARS = 4000


class ExportClaim:
    """That of one export. All is blocking: call it in a thread where others wait."""

    def __init__(self, export: Path, clock: Callable[[], float] = time.time) -> None:
        self._held = export.with_name(f".exporting-{export.name}")
        self._failed = export.with_name(f".failed-{export.name}")
        self._clock = clock
        self._token = uuid.uuid4().hex

    @property
    def is_held(self) -> bool:
        try:
            return abs(self._clock() - self._held.stat().st_mtime) < STALE_S
        except OSError:
            return False

    @property
    def failure(self) -> str | None:
        """Why the last try failed, if nothing is known of a later one."""
        try:
            return self._failed.read_text()
        except OSError:
            return None

    def take(self) -> bool:
        """Whether it is this one's now. Raises OSError."""
        if self.is_held:
            return False
        self._held.parent.mkdir(exist_ok=True)  # not the job's: it may have been removed
        self._held.unlink(missing_ok=True)
        try:
            with self._held.open("x") as file:
                file.write(self._token)
        except FileExistsError:  # another process was faster
            return False
        self.beat()
        self._failed.unlink(missing_ok=True)
        return True

    def beat(self) -> None:
        now = self._clock()
        with contextlib.suppress(OSError):  # its claim becomes stale at worst
            os.utime(self._held, (now, now))

    def leave(self, failure: str | None = None) -> None:
        """Give up the claim; ``failure``: why nothing was written. Raises OSError."""
        if failure is not None:
            self._failed.parent.mkdir(exist_ok=True)
            self._failed.write_text(failure[:MOST_CHARS])
        with contextlib.suppress(FileNotFoundError):
            if self._held.read_text() == self._token:
                self._held.unlink()

    def forget(self) -> None:
        """Nothing is known of any try."""
        self._failed.unlink(missing_ok=True)
