"""Decides which lease holders are dead: by the claimant's own clock, from a beat counter that stands still.

The rule: neither the server's clock nor another machine's decides. Only watched time counts: after a gap in watching
(the watcher was stopped, the server was away) the time starts over, so an outage does not void every lease at once. It
takes nothing away itself; the caller's compare-and-set on the observed beat does.
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
    """Whether the beat changed during gapless watching."""


class BeatWatch:
    """Check every holder at least every ``patience_s / 2`` seconds, or dead ones are never found."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._sightings: dict[Hashable, _Sighting] = {}

    def stands_still(self, holder: Hashable, beat: Hashable) -> bool:
        """Whether the ``beat`` (token and counter) of ``holder`` stayed unchanged for the whole patience."""
        now = self._clock()
        seen = self._sightings.get(holder)
        was_watched = seen is not None and now - seen.last_look <= self._patience_s / 2
        if seen is None or seen.beat != beat or not was_watched:
            self._sightings[holder] = _Sighting(beat, now, now, has_moved=was_watched)
            return False
        seen.last_look = now
        return now - seen.since >= self._patience_s

    def is_undecided(self, holder: Hashable) -> bool:
        """Whether it is being watched and has neither moved nor stood still long enough."""
        seen = self._sightings.get(holder)
        return seen is not None and not seen.has_moved and seen.last_look - seen.since < self._patience_s

    def forget(self, holder: Hashable) -> None:
        self._sightings.pop(holder, None)
