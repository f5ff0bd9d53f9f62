"""Who is dead: judged by the claimant's own clock, from a beat counter that stands still.

The rule: no clock of a server and no clock of another machine decides. Only what was watched counts: when the watcher
itself did not look for a while (it was stopped, the server was away) the time starts anew, so an outage does not take
every lease at once. It takes nothing away itself; the compare-and-set on what it saw does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Sighting:
    beat: Hashable
    since: float
    last_look: float
    has_moved: bool = False
    """Whether the beat was seen to change, without a gap in the looking."""


class BeatWatch:
    """Look at every holder at least every ``patience_s / 2`` seconds, else a dead one is never found."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._sightings: dict[Hashable, _Sighting] = {}

    def stands_still(self, holder: Hashable, beat: Hashable) -> bool:
        """Whether ``beat`` (token and counter) of ``holder`` was seen unchanged for the whole patience."""
        now = self._clock()
        seen = self._sightings.get(holder)
        was_watched = seen is not None and now - seen.last_look <= self._patience_s / 2
        if seen is None or seen.beat != beat or not was_watched:
            self._sightings[holder] = _Sighting(beat, now, now, has_moved=was_watched)
            return False
        seen.last_look = now
        return now - seen.since >= self._patience_s

    def is_undecided(self, holder: Hashable) -> bool:
        """Whether it was looked at, and has neither moved yet nor stood still for long enough."""
        seen = self._sightings.get(holder)
        return seen is not None and not seen.has_moved and seen.last_look - seen.since < self._patience_s

    def forget(self, holder: Hashable) -> None:
        self._sightings.pop(holder, None)
