"""Assembles arriving segments into groups: the trainer's live view of every unfinished episode.

Rule: refuse, count and log a segment that cannot be decoded, or that contradicts an earlier one of an episode that has
not ended, or that goes on with an attempt although a later one had begun, which Redis has lost then. Its group never
completes here, and ``unreadable`` lists it once it is ready: replacing a group beats training on data that differs from
the sampled data.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Collection

from gspo_core.assemble import Assembler
from gspo_core.codec import SegmentRejected, decode
from gspo_core.types import EpisodeKey, Group, Segment, Split, TimeSplit, Trajectory
from services.process.telemetry import get_logger
from services.state.queue import Bus, ReadyGroup

# A group can become ready without a new segment: when its last open episode is given up.
LOOK_AGAIN_S = 1.0
NEWEST_TURNS = 64


class Intake:
    """Owns the assembler of one job. ``run`` feeds it; ``wait_for`` hands out groups, oldest first."""

    def __init__(self, bus: Bus, job: str) -> None:
        self._bus = bus
        self._job = job
        self._assembler = Assembler()
        self._progress = asyncio.Condition()
        self.num_segments = 0
        """Segments read so far."""
        self.num_turns = 0
        """Turns that have begun to arrive."""
        self.newest_turns: deque[TimeSplit] = deque(maxlen=NEWEST_TURNS)
        """Where the time of the newest pieces went, as far as it was recorded."""
        self._last_turn: dict[EpisodeKey, int] = {}
        """The newest turn of each episode that has not ended."""
        self._ended: dict[int, set[int]] = {}
        """Members of each group that have ended."""
        self._taken: set[int] = set()
        self._ended_well: set[int] = set()
        self.waited: set[int] = set()
        """Ready groups that had waited for rewards."""
        self.erased: dict[int, tuple[int, ...]] = {}
        """Members of ready groups that were erased, perhaps after they had arrived here."""
        self.rejected: Counter[str] = Counter()
        self.refusals: dict[str, str] = {}
        """The first error message for each reason, until a caller removes it."""

    async def run(self) -> None:
        """Read segments until cancelled."""
        position = "0"
        while True:
            entries = await self._bus.read_segments(self._job, position)
            for entry_id, payload in entries:
                position = entry_id
                self._take(payload)
            if entries:
                async with self._progress:
                    self.num_segments += len(entries)
                    self._progress.notify_all()

    def _take(self, payload: bytes) -> None:
        try:
            segment = decode(payload)
            self._assembler.require_not_undone(segment)
            self._assembler.add(segment)
        except SegmentRejected as error:
            reason = type(error).__name__
            self.rejected[reason] += 1
            self.refusals.setdefault(reason, str(error))
            get_logger().warning("segment refused", reason=reason, error=str(error))
        else:
            self._count(segment)

    def _count(self, segment: Segment) -> None:
        key = segment.key
        if segment.num_actions and self._last_turn.get(key) != segment.turn:
            self.num_turns += 1
            self._last_turn[key] = segment.turn
        if segment.spent is not None:
            self.newest_turns.append(segment.spent)
        if segment.outcome is None:
            return
        self._last_turn.pop(key, None)
        self._ended.setdefault(key.group, set()).add(key.member)
        if segment.outcome.reward is not None:
            self._ended_well.add(key.group)

    def num_ended(self, group: int) -> int:
        """Count the episodes of ``group`` that have ended."""
        return len(self._ended.get(group, ()))

    def take_ended_well(self) -> set[int]:
        """Return the groups in which an episode has ended with a reward since the last call."""
        found, self._ended_well = self._ended_well, set()
        return found

    async def wait_for(self, split: Split, count: int, *, among: Collection[int] | None = None) -> list[Group]:
        """Wait for ``count`` complete groups of ``split``, in dispatch order; return each group only once."""
        while True:
            num_segments = self.num_segments
            groups = [group for group in await self.complete(split, among=among) if group.group not in self._taken]
            if len(groups) >= count:
                chosen = groups[:count]
                self._taken.update(group.group for group in chosen)
                return chosen
            await self.progress(num_segments)

    async def progress(self, num_segments: int) -> None:
        """Wait until ``num_segments`` has grown past the given count, or ``LOOK_AGAIN_S`` has passed.

        Read the count before querying the queue: a segment that arrives during the query may be the last one.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AGAIN_S), self._progress:
                if self.num_segments == num_segments:
                    await self._progress.wait()

    async def complete(self, split: Split, *, among: Collection[int] | None = None) -> list[Group]:
        """Return groups of ``split`` whose episodes have all ended, in dispatch order."""
        ready = await self._bus.ready_groups(self._job)
        self.waited |= {one.group for one in ready if one.num_waited}
        self.erased = {one.group: one.erased for one in ready if one.erased}
        wanted = [one for one in ready if one.split == split and (among is None or one.group in among)]
        wanted.sort(key=lambda one: one.group)
        groups = (self._assemble(one) for one in wanted)
        return [group for group in groups if group is not None]

    async def unreadable(self, *, among: Collection[int]) -> list[int]:
        """Return ready groups that never complete because a segment was refused, e.g. one from another release."""
        if not self.rejected:
            return []
        ready = await self._bus.ready_groups(self._job)
        waiting = [one for one in ready if one.group in among and self._assemble(one) is None]
        return [one.group for one in waiting if await self._is_refused(one)]

    async def _is_refused(self, one: ReadyGroup) -> bool:
        broken = self._assembler.broken(one.group)
        for member in set(range(one.size)) - set(one.dead):
            for payload in await self._bus.read_episode(EpisodeKey(self._job, one.group, member)):
                try:
                    segment = decode(payload)
                except SegmentRejected:
                    return True
                if broken.get(member, -1) >= segment.attempt:  # a later attempt is still to be read
                    return True
        return False

    def is_broken(self, group: int) -> bool:
        """Whether a member of ``group`` never completes because Redis lost some of it after it was read here."""
        return bool(self._assembler.broken(group))

    def versions(self, group: int) -> frozenset[int]:
        """Return the versions that sampled the segments of ``group`` received so far, finished or not."""
        return self._assembler.versions(group)

    def unfinished(self, group: int) -> tuple[EpisodeKey, ...]:
        """Return the episodes of ``group`` that have segments but no end yet."""
        return self._assembler.unfinished(group)

    def trajectory(self, key: EpisodeKey) -> Trajectory | None:
        """Return the episode if it has ended and is not erased, else None."""
        return None if key.member in self.erased.get(key.group, ()) else self._assembler.trajectory(key)

    def num_actions(self, key: EpisodeKey) -> int:
        """Count the tokens that an episode has sampled so far."""
        return sum(segment.num_actions for segment in self._assembler.prefix(key))

    def rewards(self, group: int, size: int) -> list[float]:
        """Return the rewards of the members of ``group`` that ended with one."""
        ended = (self.trajectory(EpisodeKey(self._job, group, member)) for member in range(size))
        return [one.reward for one in ended if one is not None and one.reward is not None]

    def _assemble(self, one: ReadyGroup) -> Group | None:
        """Assemble a group without its given-up members; return None while segments are missing."""
        return self._assembler.group(self._job, one.group, one.split, one.task_index, one.size, missing=one.dead)

    def forget(self, groups: Collection[int]) -> None:
        """Drop all state of committed groups, whose segments have left the queue."""
        for group in groups:
            self._assembler.forget(group)
            self._ended.pop(group, None)
        for key in [key for key in self._last_turn if key.group in groups]:
            del self._last_turn[key]
        self._taken.difference_update(groups)
        self.waited.difference_update(groups)
