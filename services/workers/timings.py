"""Where the time of an episode went: engine, environment, waiting for either, storing segments.

Rule: every second is counted once. The ``note`` stored with the segments carries the times to the next worker, so an
episode that moves keeps its clock. It decides nothing.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Self, TypeGuard

from gspo_core.json_value import JSON
from gspo_core.types import TimeSplit

_NAMES = ("engine_s", "env_s", "queue_s", "store_s")


@dataclass(slots=True)
class Timings:
    """Seconds since the episode's attempt began, over all workers that had it."""

    engine_s: float = 0.0
    env_s: float = 0.0
    queue_s: float = 0.0
    """No engine could take the request, the environment had no free place, or its world was brought back to where it
    had been. It does not count against the episode."""
    store_s: float = 0.0
    last_note: str = field(default="", repr=False, compare=False)
    """The last note written, or the one that this was read from."""
    _told: TimeSplit = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._told = self._now()

    def _now(self) -> TimeSplit:
        return TimeSplit(self.engine_s, self.env_s, self.queue_s)

    def take(self) -> TimeSplit:
        """The time since the last call, to the millisecond: it travels with the segment that is cut now."""
        before, self._told = self._told, self._now()
        return TimeSplit(*(round(max(0.0, now - then), 3) for now, then in zip(self._told, before, strict=True)))

    @property
    def billed_s(self) -> float:
        """The time that counts against the episode's limit."""
        return self.engine_s + self.env_s

    def note(self, **progress: int) -> str:
        """``progress`` and times as one line, to be read in the queue."""
        self.last_note = json.dumps(progress | {name: round(getattr(self, name), 3) for name in _NAMES})
        return self.last_note

    @classmethod
    def from_note(cls, note: str) -> Self:
        """Zeros if it cannot be read: another release may have written it."""
        try:
            found: JSON = json.loads(note) if note else {}
        except ValueError:
            found = {}
        given = found.items() if isinstance(found, dict) else ()
        times = {name: float(value) for name, value in given if name in _NAMES and _is_time(value)}
        return cls(**times, last_note=note)


def _is_time(value: JSON) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
