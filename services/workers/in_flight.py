"""Limits the requests in flight to one engine: as many as it runs at once, learned from its reports of its queue.

Rule: a request that would only wait in an engine waits here, where it can still go to another engine, keeps no prefix
out of the cache, and is not recomputed after a weight update. A load that runs while nothing waits is known to fit. A
limit that is reached while nothing waits grows: it doubles until the engine was full for the first time, then grows by
an eighth. A queue of up to a quarter keeps the engine full. A longer one in two reports in a row is too much (in one it
may be a burst or a pause), and the limit falls to the running requests and an eighth more.
"""

from __future__ import annotations

import math

_START = 64
_CROWDED_REPORTS = 2
# As parts of the limit: one fourth, one eighth.
_SLACK = 4
_GROWTH = 8


class InFlightLimit:
    """For one engine and the requests of this process."""

    def __init__(self, start: int = _START) -> None:
        self.value = start
        self._is_reached = False
        """Since the last report."""
        self._was_ever_crowded = False
        self._num_crowded = 0
        """Reports in a row."""

    def reached(self) -> None:
        """Reports that a request waits for this engine."""
        self._is_reached = True

    def report(self, *, num_ours: int, num_running: int, num_waiting: int) -> None:
        """Takes the engine's report on all requests; ``num_ours`` of them are from this process."""
        if not num_running and num_waiting:
            return  # paused
        if num_waiting > max(1, self.value // _SLACK):
            self._num_crowded += 1
            if self._num_crowded >= _CROWDED_REPORTS:
                self._was_ever_crowded = True
                running = num_ours * num_running / (num_running + num_waiting)
                self.value = max(1, math.ceil(running * (1 + 1 / _GROWTH)))
        else:
            self._num_crowded = 0
            if not num_waiting:
                self._grow(num_ours)
        self._is_reached = False

    def _grow(self, num_ours: int) -> None:
        self.value = max(self.value, num_ours)
        if self._is_reached:
            self.value += max(1, self.value // _GROWTH) if self._was_ever_crowded else self.value
