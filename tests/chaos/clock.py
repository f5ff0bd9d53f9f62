"""Wall clocks that jump: libfaketime reads a file that is changed here. The monotonic clock stays true, as it does when
an administrator or a time server sets a clock.

Where the library is not installed (Debian's ``libfaketime``, or a copy that ``make chaos-clock`` unpacks), no clock
jumps and the run says so.
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
        self._work = work
        work.mkdir(parents=True, exist_ok=True)
        for who in ("services", "redis"):
            self.set(who, 0)

    @property
    def can_jump(self) -> bool:
        return self._library is not None

    def _path(self, who: str) -> Path:
        return self._work / f"clock-{who}"

    def set(self, who: str, seconds: int) -> None:
        """From now on (and a second) the clock of ``services`` or ``redis`` is off by so much."""
        temporary = self._path(who).with_suffix(".new")
        temporary.write_text(f"{seconds:+d}\n")
        temporary.replace(self._path(who))

    def env(self, who: str) -> dict[str, str]:
        if self._library is None:
            return {}
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._path(who)),
            "FAKETIME_CACHE_DURATION": str(CACHE_S),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }

    @contextlib.contextmanager
    def around_a_start(self, who: str) -> Iterator[None]:
        """For a child that takes over the environment of this process."""
        added = self.env(who)
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
