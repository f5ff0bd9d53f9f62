"""The wall clock of Redis jumps: libfaketime reads a file that is changed here. The monotonic clock stays true, as it
does when an administrator or a time server sets a clock.

Where the library is not installed (Debian's ``libfaketime``, or a copy that ``get_libfaketime.sh`` unpacks), no clock
jumps and the run says so. The clocks of our own processes stay true: the library takes a lock that all of them share,
which a process takes with it when it is killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "libfaketime.so.1"
PLACES = (".make/libfaketime", "/usr/lib")
CACHE_S = 1


def find_library() -> Path | None:
    for place in PLACES:
        for path in Path(place).glob(f"**/faketime/{NAME}"):
            return path.resolve()
    return None


class Clock:
    def __init__(self, work: Path) -> None:
        self._library = find_library()
        self._path = work.absolute() / "clock"
        work.mkdir(parents=True, exist_ok=True)
        self.set(0)

    @property
    def can_jump(self) -> bool:
        return self._library is not None

    def set(self, seconds: int) -> None:
        """From now on (and a second) the clock is off by so much."""
        temporary = self._path.with_suffix(".new")
        temporary.write_text(f"{seconds:+d}\n")
        temporary.replace(self._path)

    @contextlib.contextmanager
    def around_a_start(self) -> Iterator[None]:
        """For a child that takes over the environment of this process."""
        added = self._env()
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)

    def _env(self) -> dict[str, str]:
        if self._library is None:
            return {}
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_CACHE_DURATION": str(CACHE_S),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
