"""Assembles episodes from segments as they arrive.

Rule: the result depends on *which* segments arrived, never on their order or on duplicates. A higher attempt supersedes
a lower one; two different segments for the same place are an error, because one must be wrong and there is no telling
which: an attempt that was not complete by then never will be, so no episode is joined from two that were sampled. It
ignores segments of forgotten groups, so a late redelivery cannot bring them back.

It does not decide whether a group is ready, and it keeps everything it is given: admission bounds memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field

from gspo_core.codec import SegmentRejected
from gspo_core.types import EpisodeKey, Group, Segment, Split, Trajectory


class ConflictingSegment(SegmentRejected):
    """A different segment of the same attempt already occupies this place."""


class ForeignSegment(SegmentRejected):
    """The segment belongs to another job than the one being assembled."""


class Assembler:
    """Collects the episode segments of one job, set by the first segment."""

    def __init__(self) -> None:
        self._job: str | None = None
        self._groups: dict[int, dict[int, _Episode]] = {}
        self._forgotten = _Numbers()

    def add(self, segment: Segment) -> None:
        """Add ``segment``. Known, superseded and forgotten segments change nothing."""
        key = segment.key
        if self._job not in (None, key.job):
            raise ForeignSegment(f"{key} does not belong to job {self._job}")
        if key.group in self._forgotten:
            return
        self._job = key.job
        members = self._groups.setdefault(key.group, {})
        episode = members.get(key.member)
        if episode is None or segment.attempt > episode.attempt:
            episode = members[key.member] = _Episode(segment.attempt)
        if segment.attempt == episode.attempt:
            episode.add(segment)

    def require_not_undone(self, segment: Segment) -> None:
        """For callers that get segments in the order of storage: raises ConflictingSegment if this one is of an earlier
        attempt than one before it. The later attempt was then undone, and never completes."""
        episode = self._episode(segment.key)
        if episode is not None and segment.attempt < episode.attempt:
            raise episode.conflict(segment, f"it goes on although attempt {episode.attempt} had begun")

    def trajectory(self, key: EpisodeKey) -> Trajectory | None:
        """The episode, once every segment of its newest attempt up to the outcome has arrived."""
        episode = self._episode(key)
        return None if episode is None else episode.trajectory()

    def group(
        self, job: str, group: int, split: Split, task_index: int, size: int, *, missing: Collection[int] = ()
    ) -> Group | None:
        """The group, once each of its ``size`` members is complete, ignoring those in ``missing``."""
        wanted = [member for member in range(size) if member not in missing]
        found = (self.trajectory(EpisodeKey(job, group, member)) for member in wanted)
        trajectories = tuple(trajectory for trajectory in found if trajectory is not None)
        if len(trajectories) < len(wanted):
            return None
        return Group(job=job, group=group, split=split, task_index=task_index, size=size, trajectories=trajectories)

    def prefix(self, key: EpisodeKey) -> tuple[Segment, ...]:
        """The segments of the newest attempt from its start to the first gap, i.e. the episode's progress."""
        episode = self._episode(key)
        return () if episode is None else episode.prefix()

    def episodes(self) -> tuple[EpisodeKey, ...]:
        """Episodes with at least one segment, in order."""
        return tuple(
            EpisodeKey(self._job or "", group, member)
            for group in sorted(self._groups)
            for member in sorted(self._groups[group])
        )

    def versions(self, group: int) -> frozenset[int]:
        """Versions that sampled any token held from the newest attempt of each episode of ``group``."""
        members = self._groups.get(group, {}).values()
        return frozenset[int]().union(*(episode.versions for episode in members))

    def unfinished(self, group: int) -> tuple[EpisodeKey, ...]:
        """Episodes of ``group`` with some but not all segments."""
        members = self._groups.get(group, {})
        open_members = sorted(member for member, episode in members.items() if episode.trajectory() is None)
        return tuple(EpisodeKey(self._job or "", group, member) for member in open_members)

    def broken(self, group: int) -> dict[int, int]:
        """Members of ``group`` whose newest attempt never completes because of a conflict, with that attempt."""
        members = self._groups.get(group, {})
        return {member: episode.attempt for member, episode in members.items() if episode.is_broken}

    def forget(self, group: int) -> None:
        """Free the segments of ``group``, committed or dropped, and ignore any that still arrive."""
        self._groups.pop(group, None)
        self._forgotten.add(group)

    def _episode(self, key: EpisodeKey) -> _Episode | None:
        return self._groups.get(key.group, {}).get(key.member) if key.job == self._job else None


@dataclass(slots=True)
class _Episode:
    """The segments of one attempt, by index."""

    attempt: int
    segments: dict[int, Segment] = field(default_factory=dict)
    last: int | None = None
    """Index of the segment with the outcome, once it has arrived."""
    highest: int = -1
    versions: set[int] = field(default_factory=set)
    """Versions that sampled at least one of its tokens."""
    complete: Trajectory | None = None
    """Cached, because callers poll while they wait for a group."""
    is_broken: bool = False
    """Segments of two different continuations have come, before it was complete."""

    def add(self, segment: Segment) -> None:
        known = self.segments.get(segment.index)
        if known is not None:
            if known != segment:
                raise self.conflict(segment, f"two different segments have index {segment.index}")
            return
        end = segment.index if segment.is_final else self.last
        if end is not None and (end < max(self.highest, segment.index) or self.last not in (None, end)):
            highest = max(self.highest, segment.index)
            raise self.conflict(segment, f"it ends with index {end}, but there is a segment {highest}")
        self.segments[segment.index] = segment
        if segment.num_actions:
            self.versions.add(segment.version)
        self.last = end
        self.highest = max(self.highest, segment.index)

    def conflict(self, segment: Segment, what: str) -> ConflictingSegment:
        self.is_broken = self.trajectory() is None  # a whole one may have been used
        return ConflictingSegment(f"{segment.key} attempt {segment.attempt}: {what}")

    def trajectory(self) -> Trajectory | None:
        # Indexes are distinct and none exceeds the last, so the count proves that there is no gap.
        is_whole = self.last is not None and len(self.segments) == self.last + 1
        if self.complete is None and is_whole and not self.is_broken:
            self.complete = Trajectory(self.prefix())
        return self.complete

    def prefix(self) -> tuple[Segment, ...]:
        length = 0
        while length in self.segments:
            length += 1
        return tuple(self.segments[index] for index in range(length))


class _Numbers:
    """A set of numbers added nearly in order, stored as intervals so that long runs do not grow it."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, number: int) -> bool:
        position = bisect_right(self._starts, number) - 1
        return position >= 0 and number < self._ends[position]

    def add(self, number: int) -> None:
        if number in self:
            return
        position = bisect_right(self._starts, number)
        joins_left = position > 0 and self._ends[position - 1] == number
        joins_right = position < len(self._starts) and self._starts[position] == number + 1
        if joins_left and joins_right:
            self._ends[position - 1] = self._ends.pop(position)
            del self._starts[position]
        elif joins_left:
            self._ends[position - 1] = number + 1
        elif joins_right:
            self._starts[position] = number
        else:
            self._starts.insert(position, number)
            self._ends.insert(position, number + 1)
