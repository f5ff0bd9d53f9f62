"""The audit of an installation: lines of JSON, the newest file under one name, older ones beside it under their dates.

Rule: a line is appended whole, by however many processes; a file that is large or old is set aside by exactly one of
them, and one that was set aside too long ago is removed. What a line says is up to the caller.

    audit.jsonl   audit-20260131T235959Z.jsonl   audit.lock
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

MAX_BYTES = 16 << 20
MAX_AGE_S = 30 * 86_400.0
KEPT_S = 400 * 86_400.0
"""Files that were set aside are kept for a year and a month."""
_SET_ASIDE = re.compile(r"-(\d{8}T\d{6}Z)(?:-\d+)?\.jsonl")
_FORM = "%Y%m%dT%H%M%SZ"


class AuditLog:
    """``now``: Unix seconds."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        kept_s: float = KEPT_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._kept_s = kept_s
        self._now = now

    def append(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_full():
            self._set_aside()
        # One write of a short line at the end of the file: lines of several processes do not mix.
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode() + b"\n")
        finally:
            os.close(file)

    def files(self) -> list[Path]:
        """All that there are, the oldest first."""
        found = [path for path, _ in self._set_aside_files()]
        return [*found, self.path] if self.path.is_file() else found

    def lines(self) -> Iterator[str]:
        """The oldest first."""
        for path in self.files():
            with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
                yield from (line for raw in file if (line := raw.rstrip("\n")))

    def _is_full(self) -> bool:
        try:
            about = self.path.stat()
            if about.st_size >= self._max_bytes:
                return True
            return about.st_size > 0 and self._now() - self._begun(about) >= self._max_age_s
        except FileNotFoundError:  # set aside in this moment
            return False

    def _begun(self, about: os.stat_result) -> float:
        """When its first line was written, as the line says: file systems do not keep that."""
        with self.path.open("rb") as file:
            at = re.match(rb'\{"at": "([^"]+)"', file.read(64))
        try:
            return datetime.fromisoformat(at[1].decode()).timestamp() if at else about.st_mtime
        except ValueError:
            return about.st_mtime

    def _set_aside(self) -> None:
        with self.path.with_name(f"{self.path.stem}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self._is_full():  # another process was faster
                return
            stamp, number = datetime.fromtimestamp(self._now(), UTC).strftime(_FORM), 0
            while (target := self._aside(stamp, number)).exists():
                number += 1
            self.path.rename(target)
            for path, begun in self._set_aside_files():
                if self._now() - begun > self._kept_s:
                    path.unlink(missing_ok=True)

    def _aside(self, stamp: str, number: int) -> Path:
        again = f"-{number}" if number else ""
        return self.path.with_name(f"{self.path.stem}-{stamp}{again}.jsonl")

    def _set_aside_files(self) -> list[tuple[Path, float]]:
        """With the time of each."""
        found = []
        for path in self.path.parent.glob(f"{self.path.stem}-*.jsonl"):
            match = _SET_ASIDE.fullmatch(path.name.removeprefix(self.path.stem))
            if match:
                at = datetime.strptime(match[1], _FORM).replace(tzinfo=UTC).timestamp()
                found.append((path, at))
        return sorted(found, key=lambda one: (one[1], len(one[0].name), one[0].name))
