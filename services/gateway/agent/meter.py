"""Measures where an agent's time goes, while several of its turns may be sampled at once.

Rule: every second counts once: as sampling while anything is sampled, else as storing, else as the agent's own.
Waiting for an engine, or for an agent to come, does not count against the episode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gspo_core.types import TimeSplit
from services.episodes.counters import Counters
from services.workers.timings import Timings


class Meter:
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
        """Of that, what surely counts: what is being sampled may yet turn out to have waited for an engine."""
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
