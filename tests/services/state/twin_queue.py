"""The queue in memory: what ``services.state.queue.Bus`` promises, said a second time and more simply.

The rule kept here: no code is shared with the real functions but the nouns, so that the two can be compared. Replies
are never lost here, so what the real one does about lost replies is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime
from uuid import uuid4

from gspo_core.types import EpisodeKey, Split
from services.state.leases import BeatWatch
from services.state.queue_records import (
    Append,
    DeadLetter,
    EpisodeView,
    GroupView,
    Kept,
    LeasedEpisode,
    QueueUsage,
    ReadyGroup,
    Snapshot,
    Stage,
)
from services.state.refusals import Conflict, Fenced, Full, Gap
from tests.services.state.twin_erasing import TwinErasing
from tests.services.state.twin_rewards import TwinAwaitedRewards, find, note_completion
from tests.services.state.twin_world import TwinEpisode, TwinGroup, TwinQueue, TwinSegment, World, fenced

MAX_FAILURES = 3
DEAD_LETTERS_KEPT = 1000
MAX_REASON_CHARS = 500
MAX_NOTE_CHARS = 500
_REASON = re.compile(r"trained|evaluated|dropped_[a-z0-9_]{1,40}")
_ENDED = (Stage.DONE, Stage.DEAD)
_SUSPECT = -1


class TwinBus(TwinAwaitedRewards, TwinErasing):
    """Has the methods of ``Bus``, with the same meaning; see there."""

    def __init__(self, world: World, *, lease_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._watch = BeatWatch(lease_s, clock)

    async def load_functions(self) -> None:
        """There is nothing to load."""

    # The trainer's side

    async def dispatch(
        self,
        job: str,
        token: str,
        group: int,
        *,
        size: int,
        split: Split,
        task_index: int,
        environment: int = 0,
        bytes_per_episode: int = 0,
        budget_bytes: int | None = None,
        reads: int = 0,
    ) -> bool:
        if group < 0 or size < 1 or bytes_per_episode < 0:
            raise ValueError(
                f"a group needs a number >= 0, at least one episode and bytes >= 0, not {group}, {size} and "
                f"{bytes_per_episode}"
            )
        if not self._world.owns(job, token):
            raise Fenced(f"dispatch of group {group}")
        queue = self._world.queue(job)
        if group in queue.groups:
            return False
        charged = (await self.usage(job)).charged_bytes
        if budget_bytes is not None and charged + size * bytes_per_episode > budget_bytes:
            raise Full(f"group {group}: {charged} of {budget_bytes} bytes are taken")
        queue.sequence += 1
        episodes = [TwinEpisode(queue.sequence, bytes_per_episode) for _ in range(size)]
        queue.groups[group] = TwinGroup(split, task_index, environment, episodes, self._world.epochs[job], reads)
        queue.counters["dispatched"] += 1
        return True

    async def read_segments(
        self, job: str, after: str = "0", *, count: int = 256, block_ms: int = 200
    ) -> list[tuple[str, bytes]]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(block_ms / 1000), self._world.news:
                while not self._segments_after(job, after):
                    await self._world.news.wait()
        found = self._segments_after(job, after)[:count]
        return [(f"{segment.position}-0", segment.payload) for segment in found]

    def _segments_after(self, job: str, after: str) -> list[TwinSegment]:
        queue, position = self._world.queue(job), int(after.partition("-")[0])
        if position > queue.last_position > 0:
            position = 0  # of another stream: the queue was made anew since
        segments = [segment for _, episode in _episodes(queue) for segment in episode.segments]
        return sorted((one for one in segments if one.position > position), key=lambda one: one.position)

    async def ready_groups(self, job: str) -> list[ReadyGroup]:
        ready = [(group.completion, number, group) for number, group in self._world.queue(job).groups.items()]
        complete = sorted((entry for entry in ready if entry[0] is not None), key=lambda entry: entry[0] or 0)
        return [
            ReadyGroup(
                number,
                group.split,
                group.task_index,
                group.environment,
                len(group.episodes),
                _dead(group),
                group.num_waited,
                tuple(member for member, one in enumerate(group.episodes) if one.is_erased),
            )
            for _, number, group in complete
        ]

    async def open_groups(self, job: str) -> list[int]:
        return sorted(self._world.queue(job).groups)

    async def commit(self, job: str, token: str, step: int, groups: Sequence[int], *, reason: str = "trained") -> None:
        if not _REASON.fullmatch(reason):
            raise ValueError(f"a group is settled as trained, evaluated or dropped_<why>, not {reason!r}")
        if not self._world.owns(job, token):
            raise Fenced(f"commit of step {step}")
        queue = self._world.queue(job)
        for group in groups:
            if queue.groups.pop(group, None) is not None:
                queue.counters[reason] += 1

    async def cancel(self, job: str, token: str, group: int) -> int:
        if not self._world.owns(job, token):
            raise Fenced(f"cancelling what is left of group {group}")
        queue = self._world.queue(job)
        held = queue.groups.get(group)
        left = [one for one in held.episodes if one.stage not in _ENDED] if held else []
        for episode in left:
            _end_without_outcome(episode)
        if left:
            note_completion(queue, group)
        return len(left)

    async def counters(self, job: str) -> dict[str, int]:
        queue = self._world.queue(job)
        return {"dispatched": 0, "trained": 0, "evaluated": 0, **queue.counters, "in_flight": len(queue.groups)}

    # To look at

    async def usage(self, job: str) -> QueueUsage:
        queue = self._world.queue(job)
        episodes = [episode for _, episode in _episodes(queue)]
        return QueueUsage(
            charged_bytes=sum(episode.charged_bytes for episode in episodes),
            stored_bytes=sum(episode.stored_bytes + episode.snapshot_bytes for episode in episodes),
            num_dead_letters=queue.num_dead_letters,
        )

    async def groups(self, job: str, *, after: int = -1, limit: int = 100) -> list[GroupView]:
        queue = self._world.queue(job)
        numbers = [number for number in sorted(queue.groups) if number > after][:limit]
        return [_view(job, number, queue) for number in numbers]

    async def dead_letters(self, job: str, after: str = "0", *, count: int = 100) -> list[DeadLetter]:
        position = int(after.partition("-")[0])
        letters = self._world.queue(job).dead_letters
        return [letter for letter in letters if int(letter.id.partition("-")[0]) > position][:count]

    # The worker's side

    async def join(self, worker: str) -> str:
        token = uuid4().hex
        self._world.lease_tokens[worker], self._world.lease_beats[worker] = token, 0
        return token

    async def beat(self, worker: str, token: str) -> None:
        if self._world.lease_tokens.get(worker) != token:
            raise Fenced(f"beat of worker {worker}")
        self._world.lease_beats[worker] += 1

    async def leave(self, worker: str, token: str) -> None:
        if self._world.lease_tokens.get(worker) == token:
            del self._world.lease_tokens[worker], self._world.lease_beats[worker]

    async def lease(self, job: str, worker: str, token: str, limit: int) -> list[LeasedEpisode]:
        queue = self._world.queue(job)
        waiting = [(key, one) for key, one in _episodes(queue) if one.stage is Stage.QUEUED]
        waiting.sort(key=lambda entry: _order(*entry))
        suspects = [entry for entry in waiting if _order(*entry)[0] == _SUSPECT]
        holds_one = any(_holds(one, token) and one.is_suspect for _, one in _episodes(queue))
        taken = [] if holds_one else suspects[: min(max(limit, 0), 1)]
        taken += waiting[len(suspects) :][: max(limit - len(taken), 0)]
        for _, episode in taken:
            episode.stage, episode.token = Stage.HELD, token
            queue.holders[token] = worker
        return [_lease(job, key, queue) for key, _ in taken]

    async def take(self, job: str, worker: str, token: str, keys: Sequence[EpisodeKey]) -> list[LeasedEpisode]:
        queue = self._world.queue(job)
        taken: list[EpisodeKey] = []
        for key in keys:
            episode = find(queue, key)
            if episode is not None and episode.stage is Stage.QUEUED:
                episode.stage, episode.token = Stage.HELD, token
                queue.holders[token] = worker
            if episode is not None and _holds(episode, token):
                taken.append(key)
        return [_lease(job, (key.group, key.member), queue) for key in taken]

    async def append(self, job: str, token: str, appends: Sequence[Append | Kept]) -> None:
        queue = self._world.queue(job)
        for item in appends:
            if item.key.job != job:
                raise ValueError(f"{item.key} is not an episode of job {job}")
        # Tried on copies, so that a refusal of the last one leaves nothing of the first.
        changed: dict[EpisodeKey, TwinEpisode] = {}
        position = queue.last_position
        for item in appends:
            episode = changed.get(item.key) or _copy_of(queue, item.key)
            if isinstance(item, Kept):
                changed[item.key] = _keep(episode, token, item)
                continue
            _check_append(episode, token, item)
            assert episode is not None
            changed[item.key] = episode
            if item.index == len(episode.segments):
                position += 1
                episode.segments.append(TwinSegment(position, item.payload, item.final))
                episode.stage = Stage.DONE if item.final else Stage.HELD
                episode.snapshot = None if item.final else episode.snapshot
                episode.note = item.note[:MAX_NOTE_CHARS] or episode.note
                if item.version is not None:
                    episode.version = min(item.version, item.version if episode.version is None else episode.version)
        last = (item.key for item in appends if isinstance(item, Append) and item.final)
        ended = dict.fromkeys(key for key in last if _ends(queue, key, changed))
        for key, episode in changed.items():
            queue.groups[key.group].episodes[key.member] = episode
        queue.last_position = position
        for key in ended:
            note_completion(queue, key.group)
        async with self._world.news:
            self._world.news.notify_all()

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[Append] = ()) -> None:
        for index, item in enumerate(kept):
            if (item.key, item.attempt, item.index, item.final) != (key, attempt, index, False):
                raise ValueError(f"attempt {attempt} of {key} does not begin with segment {item.index} of {item.key}")
        episode = find(self._world.queue(key.job), key)
        if episode is None or not _holds(episode, token) or attempt < episode.attempt:
            raise fenced(episode, f"restart of episode {key} as attempt {attempt}")
        if attempt == episode.attempt:
            return
        if attempt > episode.attempt + 1:
            raise Gap(f"attempt {attempt} of episode {key}, there is only {episode.attempt}")
        world = episode.snapshot
        if kept and (world is None or world.num_segments != len(kept) or world.parts):
            raise Gap(f"attempt {attempt} of episode {key}: no world after segment {len(kept)}")
        episode.furthest = max(episode.furthest, len(episode.segments))
        episode.attempt, episode.segments = attempt, []
        episode.version = min((item.version for item in kept if item.version is not None), default=None)
        episode.note = kept[-1].note[:MAX_NOTE_CHARS] if kept else ""
        episode.snapshot, episode.last_part = replace(world, attempt=attempt) if kept and world else None, None
        queue = self._world.queue(key.job)
        for item in kept:
            queue.last_position += 1
            episode.segments.append(TwinSegment(queue.last_position, item.payload, item.final))

    async def hand_back(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        for key in keys:
            episode = find(self._world.queue(job), key)
            if episode is not None and _holds(episode, token):
                _requeue(episode)

    async def interrupt(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        queue = self._world.queue(job)
        for key in keys:
            episode = find(queue, key)
            if episode is not None and _holds(episode, token):
                queue.sequence += 1
                episode.stage, episode.token, episode.came_back = Stage.QUEUED, "", False
                episode.sequence = queue.sequence

    async def num_queued(self, job: str) -> int:
        return sum(one.stage is Stage.QUEUED for _, one in _episodes(self._world.queue(job)))

    async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None:
        episode = find(self._world.queue(key.job), key)
        if episode is None or not _holds(episode, token) or snapshot.attempt < episode.attempt:
            raise fenced(episode, f"snapshot of episode {key}")
        if (snapshot.attempt, snapshot.num_segments) != (episode.attempt, len(episode.segments)):
            raise Gap(f"snapshot of episode {key} after segment {snapshot.num_segments}")
        episode.snapshot, episode.last_part = snapshot, None

    async def read_snapshot(self, key: EpisodeKey) -> Snapshot | None:
        episode = find(self._world.queue(key.job), key)
        return None if episode is None else episode.snapshot

    async def fail(self, key: EpisodeKey, token: str, reason: str) -> None:
        episode = find(self._world.queue(key.job), key)
        if episode is not None and _holds(episode, token):
            self._fail(key, episode, reason[:MAX_REASON_CHARS], is_death=False)

    def _fail(self, key: EpisodeKey, episode: TwinEpisode, reason: str, *, is_death: bool) -> None:
        queue = self._world.queue(key.job)
        if len(episode.segments) > episode.furthest:
            episode.furthest, episode.failures, episode.deaths = len(episode.segments), 0, 0
        elif is_death and not episode.is_suspect:
            episode.deaths += 1
        else:
            episode.failures += 1
        if episode.failures < MAX_FAILURES:
            _requeue(episode)
            return
        _end_without_outcome(episode)
        queue.num_dead_letters += 1
        letter = DeadLetter(
            f"{queue.num_dead_letters}-0",
            key,
            episode.attempt,
            len(episode.segments),
            episode.failures,
            reason,
            datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        )
        queue.dead_letters = [*queue.dead_letters, letter][-DEAD_LETTERS_KEPT:]
        note_completion(queue, key.group)

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        episode = find(self._world.queue(key.job), key)
        return [] if episode is None else [segment.payload for segment in episode.segments]

    async def reap(self, job: str) -> int:
        queue, count = self._world.queue(job), 0
        for token, worker in list(queue.holders.items()):
            held = [(key, one) for key, one in _episodes(queue) if _holds(one, token)]
            if not held:
                del queue.holders[token]
            elif self._is_over(worker, token):
                for (group, member), episode in held:
                    reason = f"the lease of worker {worker} expired: it died, or its heartbeats did not arrive"
                    self._fail(EpisodeKey(job, group, member), episode, reason, is_death=True)
                count += len(held)
        return count

    def _is_over(self, worker: str, token: str) -> bool:
        current, beat = self._world.lease_tokens.get(worker), self._world.lease_beats.get(worker)
        if current != token:
            return True
        if not self._watch.stands_still(worker, (current, beat)):
            return False
        del self._world.lease_tokens[worker], self._world.lease_beats[worker]
        self._watch.forget(worker)
        return True


def _episodes(queue: TwinQueue) -> Iterator[tuple[tuple[int, int], TwinEpisode]]:
    for number, group in queue.groups.items():
        for member, episode in enumerate(group.episodes):
            yield (number, member), episode


def _copy_of(queue: TwinQueue, key: EpisodeKey) -> TwinEpisode | None:
    found = find(queue, key)
    if found is not None:
        found = copy(found)
        found.segments = list(found.segments)
    return found


def _holds(episode: TwinEpisode, token: str) -> bool:
    return bool(token) and episode.stage is Stage.HELD and episode.token == token


def _end_without_outcome(episode: TwinEpisode) -> None:
    episode.stage, episode.token, episode.snapshot, episode.awaited = Stage.DEAD, "", None, None


def _requeue(episode: TwinEpisode) -> None:
    episode.stage, episode.token, episode.came_back = Stage.QUEUED, "", True


def _order(key: tuple[int, int], episode: TwinEpisode) -> tuple[int, int, int, str]:
    """What came back goes first: suspects, what has tokens by the oldest version, then what has none; new ones in order
    of dispatch."""
    if episode.came_back and episode.is_suspect:
        return _SUSPECT, 0, episode.sequence, f"{key[0]}:{key[1]}"
    kind = 2 if not episode.came_back else 1 if episode.version is None else 0
    version = episode.version if episode.came_back and episode.version is not None else 0
    return kind, version, episode.sequence, f"{key[0]}:{key[1]}"


def _check_append(episode: TwinEpisode | None, token: str, item: Append) -> None:
    """``episode`` as it is after the appends before this one; a new segment or an exact resend passes."""
    name = f"segment {item.key.group}:{item.key.member}:{item.index}"
    if episode is None or not token or episode.token != token or item.attempt < episode.attempt:
        raise fenced(episode, f"append of {name}")
    if item.attempt > episode.attempt or item.index > len(episode.segments):
        raise Gap(f"{name} of attempt {item.attempt}, there are {len(episode.segments)} of {episode.attempt}")
    if item.index < len(episode.segments):
        known = episode.segments[item.index]
        if (known.payload, known.final) != (item.payload, item.final):
            raise Conflict(name)
    elif episode.stage in _ENDED:
        raise Conflict(f"{name} after the last one of its episode")


def _with_part(episode: TwinEpisode, data: bytes) -> Snapshot:
    """What equals the part that was added last is a resend."""
    held = episode.snapshot
    if held is None:
        return Snapshot(episode.attempt, len(episode.segments), data)
    parts = held.parts if data == episode.last_part else (*held.parts, data)
    return replace(held, num_segments=len(episode.segments) if parts != held.parts else held.num_segments, parts=parts)


def _keep(episode: TwinEpisode | None, token: str, kept: Kept) -> TwinEpisode:
    """``episode`` with the snapshot, unless it has gone on or ended since."""
    snapshot = kept.snapshot
    if episode is None or not token or episode.token != token or snapshot.attempt < episode.attempt:
        raise fenced(episode, f"snapshot of episode {kept.key}")
    if snapshot.attempt > episode.attempt or snapshot.num_segments > len(episode.segments):
        raise Gap(f"snapshot of episode {kept.key} after segment {snapshot.num_segments}")
    if snapshot.num_segments == len(episode.segments) and episode.stage not in _ENDED:
        episode.snapshot = _with_part(episode, snapshot.data) if kept.is_part else snapshot
        episode.last_part = snapshot.data if kept.is_part else None
    return episode


def _ends(queue: TwinQueue, key: EpisodeKey, changed: dict[EpisodeKey, TwinEpisode]) -> bool:
    """Whether the episode ends with these appends, and had not before."""
    before = find(queue, key)
    return before is not None and before.stage is not Stage.DONE and changed[key].stage is Stage.DONE


def _dead(group: TwinGroup) -> tuple[int, ...]:
    return tuple(member for member, one in enumerate(group.episodes) if one.stage is Stage.DEAD)


def _lease(job: str, key: tuple[int, int], queue: TwinQueue) -> LeasedEpisode:
    number, member = key
    group = queue.groups[number]
    episode = group.episodes[member]
    return LeasedEpisode(
        EpisodeKey(job, number, member),
        attempt=episode.attempt,
        num_segments=len(episode.segments),
        split=group.split,
        task_index=group.task_index,
        environment=group.environment,
        group_size=len(group.episodes),
        num_failures=episode.failures,
        note=episode.note,
        epoch=group.epoch,
        reads=group.reads,
    )


def _view(job: str, number: int, queue: TwinQueue) -> GroupView:
    group = queue.groups[number]
    episodes = tuple(
        EpisodeView(
            EpisodeKey(job, number, member),
            one.stage,
            queue.holders.get(one.token) if one.stage is Stage.HELD else None,
            one.attempt,
            len(one.segments),
            one.stored_bytes,
            one.version,
            one.failures,
            one.note,
        )
        for member, one in enumerate(group.episodes)
    )
    return GroupView(number, group.split, group.task_index, group.environment, episodes)
