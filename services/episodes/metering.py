"""What is counted and timed of episodes: events by cause, and where the time of each one went.

Rule: no failure is silent, counters only rise, and no decision depends on them. Every second of an episode is counted
once; storing it, or waiting for an engine, for a place in the environment or for an agent, does not count against it.
The ``note`` stored with the segments carries the times to the next worker, so an episode that moves keeps its clock.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self, TypeGuard

from gspo_core.json_value import JSON
from gspo_core.types import StopReason, TimeSplit

_NAMES = ("engine_s", "env_s", "queue_s", "store_s")


class Counters:
    """Names read ``noun/cause``, as the metrics of the REST API do."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, number: int | bool = 1) -> None:
        self._counts[name] += number

    def add_s(self, name: str, seconds: float) -> None:
        """Time spent on something, over all episodes."""
        self._seconds[name] += seconds

    def episode_finished(self, stop_reason: StopReason, num_sampled: int, num_versions: int) -> None:
        self.add("episodes/finished")
        self.add(f"stop/{stop_reason}")
        self.add("tokens/finished", num_sampled)
        if num_versions > 1:
            self.add("episodes/mixed_versions")

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> Mapping[str, float]:
        times = {name: round(seconds, 3) for name, seconds in self._seconds.items()}
        return dict(sorted((self._counts | times).items()))


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


class Meter:
    """The time of an agent's episode, of which several turns may be sampled at once: that of sampling while anything is
    sampled, else that of storing, else the agent's own."""

    def __init__(self, timings: Timings, counters: Counters, clock: Callable[[], float]) -> None:
        self.timings = timings
        self._counters = counters
        self._clock = clock
        self._since = clock()
        self._samplings: list[float] = []
        """When each that goes on began."""
        self._num_storing = 0
        self._num_unattended = 0
        self._held_until = 0.0

    def begin(self) -> None:
        """What went by before was no time of the agent's."""
        self._since = self._clock()

    @property
    def is_sampling(self) -> bool:
        return bool(self._samplings)

    @property
    def billed_s(self) -> float:
        """The time so far that counts against the episode's limit."""
        self._settle()
        return self.timings.billed_s

    @property
    def spent_s(self) -> float:
        """The part of it that surely counts: sampling under way may turn out to have waited for an engine."""
        billed_s = self.billed_s
        return billed_s - (self._since - min(self._samplings)) if self._samplings else billed_s

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        self._settle()
        began = self._since
        self._samplings.append(began)
        try:
            yield
        finally:
            self._settle()
            self._samplings.remove(began)

    @contextlib.contextmanager
    def unattended(self) -> Iterator[None]:
        """No agent plays the episode yet."""
        self._settle()
        self._num_unattended += 1
        try:
            yield
        finally:
            self._settle()
            self._num_unattended -= 1

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        self._settle()
        self._num_storing += 1
        try:
            yield
        finally:
            self._settle()
            self._num_storing -= 1

    def held(self, began: float, held_s: float) -> None:
        """A sampling that began then waited so long first."""
        self._settle()
        new_s = began + held_s - max(began, self._held_until)
        if new_s > 0:
            self._held_until = began + held_s
            self.timings.engine_s -= new_s
            self.timings.queue_s += new_s

    def take(self) -> TimeSplit:
        """The time since the last call."""
        self._settle()
        spent = self.timings.take()
        for name, seconds in zip(("engine_s", "env_s", "queue_s"), spent, strict=True):
            self._counters.add_s(f"time/{name}", seconds)
        return spent

    def _settle(self) -> None:
        now = self._clock()
        went_by, self._since = now - self._since, now
        if self._samplings:
            self.timings.engine_s += went_by
        elif self._num_storing:
            self.timings.store_s += went_by
        elif self._num_unattended:
            self.timings.queue_s += went_by
        else:
            self.timings.env_s += went_by
