"""Merges the logs of all processes into one terminal stream, prefixing each line with its process's name.

Rule: it never changes the log files, which are the record. It escapes control characters so that none acts on the
terminal, and reads files only when ``news`` is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from gspo_core.cli.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

NAME_WIDTH = 10
MAX_READ_BYTES = 1 << 20
STYLES = {"warning": "yellow", "error": "bold red", "critical": "bold red"}
COLOURS = ("cyan", "magenta", "green", "blue", "bright_cyan", "bright_magenta")
# Already in the line prefix, or identical in every line of a process.
_FAMILIAR = frozenset({"service", "level", "timestamp", "event", "worker", "exception"})


class LogView:
    """Follows the logs in ``directory`` from their current ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_to = {path: path.stat().st_size for path in self._paths()}
        self._pending: dict[Path, bytes] = {}

    def _paths(self) -> Iterable[Path]:
        return sorted(self._directory.glob("*.log"))

    def news(self) -> Iterator[Text]:
        """Complete lines since the last call, sorted by timestamp; lines without one follow their predecessor."""
        found: list[tuple[str, str, str, str]] = []
        for number, path in enumerate(self._paths()):
            at = ""
            for line in self._new_lines(path):
                at = str((_record(line) or {}).get("timestamp", at))
                found.append((at, path.stem, COLOURS[number % len(COLOURS)], line))
        for _, name, colour, line in sorted(found, key=itemgetter(0)):
            yield rendered(name, colour, line)

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as log:
            start = self._read_to.get(path, 0)
            if log.seek(0, os.SEEK_END) < start:  # truncated, e.g. by log rotation
                start = 0
            log.seek(start)
            found = log.read(MAX_READ_BYTES)
        self._read_to[path] = start + len(found)
        *whole, rest = (self._pending.pop(path, b"") + found).split(b"\n")
        if rest:
            self._pending[path] = rest[-MAX_READ_BYTES:]
        lines = (_last_state(line.decode(errors="replace")) for line in whole)
        return [line for line in lines if line.strip()]


def _last_state(line: str) -> str:
    """The final text of a line that overwrites itself with carriage returns; empty for a progress bar."""
    last = line.rpartition("\r")[2]
    return "" if "%|" in last else last


def rendered(name: str, colour: str, line: str) -> Text:
    from rich.text import Text

    record = _record(line)
    head = Text.assemble(
        (_hour(str(record.get("timestamp")) if record else ""), "dim"),
        "  ",
        (f"{name:<{NAME_WIDTH}}", colour),
        " ",
        no_wrap=True,
    )
    head.overflow = "ellipsis"
    if record is None:
        return head.append(plain(line))
    head.append(plain(str(record.get("event", ""))), STYLES.get(str(record.get("level")), ""))
    for key, value in record.items():
        if key not in _FAMILIAR:
            head.append(f"  {plain(key)}=", "dim").append(plain(_value(value)))
    if trace := str(record.get("exception", "")).strip():
        head.append("  " + plain(trace.splitlines()[-1]), "red")
    return head


def _record(line: str) -> Mapping[str, JsonValue] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _hour(timestamp: str) -> str:
    """Format the time of day in local time; blank without a timestamp."""
    try:
        return datetime.fromisoformat(timestamp).astimezone().strftime("%H:%M:%S")
    except ValueError:
        return " " * 8


def _value(value: JsonValue) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
