"""Restarts ended processes of a stack, with a doubling delay.

Rule: it reports every restart, and the delay for a process that keeps dying levels off at half a minute. A minute of
health resets its count of deaths. The supervisor stops nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
WELL_AFTER_S = 60.0


class Restartable(Protocol):
    """The part of a stack that a supervisor uses."""

    def ended(self) -> dict[str, int | None]:
        """Processes that are not running, each with its exit code if known."""
        ...

    def restart(self, name: str) -> None: ...


@dataclass
class _Record:
    deaths: int = 0
    """Consecutive deaths with less than a minute of health in between."""
    started_at: float = float("-inf")
    due_at: float | None = None
    """Time of the next start."""


class Supervisor:
    """Call ``look`` regularly; ``say`` receives each line for the terminal."""

    def __init__(
        self, stack: Restartable, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stack = stack
        self._say = say
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def look(self) -> None:
        """Schedule restarts of ended processes and perform those that are due."""
        for name, code in self._stack.ended().items():
            record = self._records.setdefault(name, _Record())
            if record.due_at is None:
                self._plan(name, code, record)
            elif self._clock() >= record.due_at:
                self._restart(name, record)

    def _plan(self, name: str, code: int | None, record: _Record) -> None:
        now = self._clock()
        record.deaths = 1 if now - record.started_at >= WELL_AFTER_S else record.deaths + 1
        # Bound the exponent too: a process may keep dying for months.
        wait_s = min(FIRST_WAIT_S * 2 ** min(record.deaths - 1, 10), LONGEST_WAIT_S)
        record.due_at = now + wait_s
        again = f", {record.deaths} times in a row" if record.deaths > 1 else ""
        self._say(f"{name} {_ending(code)}{again}; restarting it in {wait_s:.0f} s")

    def _restart(self, name: str, record: _Record) -> None:
        record.due_at, record.started_at = None, self._clock()
        try:
            self._stack.restart(name)
        except (RuntimeError, OSError) as error:
            # For example, Redis cannot read its data or memory ran out; the next look schedules another try.
            self._say(f"{name} cannot be started: {error}")
            return
        self._say(f"{name} is running again")


def _ending(code: int | None) -> str:
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
