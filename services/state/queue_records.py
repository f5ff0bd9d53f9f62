"""The queue's inputs and outputs: leases, appends, ready groups, and views for outside readers.

Duty: the records of ``queue`` and their parsing from replies. The rule: plain frozen values. It sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, TypeAlias

from zlib_ng.zlib_ng import crc32

from gspo_core.types import EpisodeKey, Split

DropReason: TypeAlias = Literal[
    "dropped_partial",
    "dropped_zero_variance",
    "dropped_no_tokens",
    "dropped_mismatch",
    "dropped_unreadable",
    "dropped_stale",
    "dropped_late",
    "dropped_erased",
    "dropped_trainer_lost",
    "dropped_went_back",
    "dropped_redis_full",
    "dropped_job_over",
    "dropped_queue_damaged",
]
"""Why a group was thrown away."""

GroupEnd: TypeAlias = Literal["trained", "evaluated"] | DropReason


@dataclass(frozen=True, slots=True)
class LeasedEpisode:
    """An episode to run, or to resume after its ``num_segments`` segments of ``attempt``."""

    key: EpisodeKey
    attempt: int
    num_segments: int
    split: Split
    task_index: int
    environment: int
    group_size: int
    num_failures: int = 0
    """Consecutive leases that ended badly without getting further than ever before."""
    note: str = ""
    """The latest note on this attempt."""
    epoch: int = 0
    """That of the trainer that dispatched its group. If the queue is lost, attempts count anew under a later epoch."""
    reads: int = 0
    """The newest schema of segments that this trainer reads; 0 for one of release 0.2.0 or before."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A group whose episodes have all ended, not committed yet."""

    group: int
    split: Split
    task_index: int
    environment: int
    size: int
    dead: tuple[int, ...] = ()
    """Members without an outcome: they failed too often (see ``DeadLetter``)."""
    num_waited: int = 0
    """Members that had ended and then waited for their reward, whether it came or not."""
    erased: tuple[int, ...] = ()
    """Members of ``dead`` that were erased, perhaps after they had ended well."""


@dataclass(frozen=True, slots=True)
class Append:
    """One segment to append; ``final`` ends its episode."""

    key: EpisodeKey
    attempt: int
    index: int
    payload: bytes
    final: bool
    version: int | None = None
    """The version that sampled its tokens; among returned episodes the one with the oldest version goes first."""
    note: str = ""
    """The episode's progress, viewable while it runs; not part of the segment. The newest note counts."""


class Stage(StrEnum):
    """The stage of an episode; it is in exactly one."""

    QUEUED = "queued"
    HELD = "held"
    WAITING = "waiting"
    """It has ended, and waits only for its reward."""
    DONE = "done"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EpisodeView:
    key: EpisodeKey
    stage: Stage
    worker: str | None
    """The worker that holds it."""
    attempt: int
    num_segments: int
    size_bytes: int
    oldest_version: int | None
    num_failures: int
    note: str = ""
    """Its worker's note on the newest segment."""


@dataclass(frozen=True, slots=True)
class GroupView:
    group: int
    split: Split
    task_index: int
    environment: int
    episodes: tuple[EpisodeView, ...]

    @property
    def is_ready(self) -> bool:
        return all(episode.stage in (Stage.DONE, Stage.DEAD) for episode in self.episodes)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A world as it was after ``num_segments`` segments of ``attempt``."""

    attempt: int
    num_segments: int
    data: bytes
    parts: tuple[bytes, ...] = ()
    """What was added to it since, in order."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot to be stored together with appends, in its place among them."""

    key: EpisodeKey
    snapshot: Snapshot
    is_part: bool = False
    """Its data is added behind what is kept, instead of taking its place. Adding the same twice must mean the same."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A lease that was begun in a place."""

    token: str
    generation: int
    """How many workers had the place so far, with this one; 0 where another has it by now."""


@dataclass(frozen=True, slots=True)
class PostedReward:
    """One reward that came after the end of its episode."""

    token: str
    """Equal tokens mean the same reward; empty: none was given."""
    turn: int
    value: float


class RewardWord(StrEnum):
    """What became of a reward that came after the end of its episode."""

    TAKEN = "taken"
    AGAIN = "again"
    """This reward was taken before, with this token."""
    CONFLICT = "conflict"
    """Another reward was taken with this token."""
    CHANGED = "changed"
    """Another reward came in between: look again."""
    LATE = "late"
    """The deadline is over."""
    ENDED = "ended"
    """The episode has its outcome, or began again, or its group is settled."""
    PLAYING = "playing"
    """It does not wait for a reward, or not yet."""


class ErasedWord(StrEnum):
    """The result of a request to erase an episode."""

    ERASED = "erased"
    """Nothing of it is in the queue, now or since an earlier wish."""
    SEALED = "sealed"
    """Its group goes into a batch log just now."""
    ABSENT = "absent"
    """It is not in the queue (any more)."""


@dataclass(frozen=True, slots=True)
class AwaitedReward:
    """An episode that has ended and waits for its reward."""

    payload: bytes
    """Its last segment, if no reward comes."""
    kept: bytes
    """What else is needed to make its last segment with a reward."""
    posted: tuple[PostedReward, ...]
    """Rewards of turns that came meanwhile."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What of a job waits for rewards."""

    num_episodes: int = 0
    num_late: int = 0
    """Rewards that came after the end of their episodes, ever."""
    num_missed: int = 0
    """Episodes whose reward did not come, ever."""
    groups: tuple[int, ...] = ()
    """Those of which nothing else is missing."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An episode that was given up."""

    id: str
    """Continue reading after this id."""
    key: EpisodeKey
    attempt: int
    num_segments: int
    num_failures: int
    reason: str
    """The reason of the last failure."""
    created_at: str


@dataclass(frozen=True, slots=True)
class QueueUsage:
    charged_bytes: int
    """Bytes counted by the budget: reservations of unfinished episodes plus payloads of finished ones."""
    stored_bytes: int
    """Bytes of stored payloads and snapshots."""
    num_dead_letters: int
    """Total ever written; the oldest are not kept."""


def member_name(key: EpisodeKey) -> str:
    return f"{key.group}:{key.member}"


def digest_of(item: Append) -> str:
    """Makes a resend recognizable; covers whether a segment ends its episode.

    It detects defects, not forgery: any appender may append anything. A cryptographic digest took a fifth of the time
    of a 16 KiB append.
    """
    return digest_of_bytes(item.payload) + ("f" if item.final else "")


def digest_of_bytes(data: bytes) -> str:
    return f"{crc32(data):08x}{len(data):x}"


def read_lease(job: str, row: Sequence[Any]) -> LeasedEpisode:
    group, member, attempt, num_segments, split, task_index, environment, size, failures, note, epoch, reads = row
    return LeasedEpisode(
        EpisodeKey(job, int(group), int(member)),
        attempt=int(attempt),
        num_segments=int(num_segments),
        split=Split(split.decode()),
        task_index=int(task_index),
        environment=int(environment),
        group_size=int(size),
        num_failures=int(failures),
        note=note.decode(),
        epoch=int(epoch),
        reads=int(reads),
    )


def read_ready(row: Sequence[Any]) -> ReadyGroup:
    group, split, task_index, environment, size, dead, waited, erased = row
    place = int(task_index), int(environment), int(size)
    return ReadyGroup(int(group), Split(split.decode()), *place, _members(dead), int(waited), _members(erased))


def _members(listed: bytes) -> tuple[int, ...]:
    return tuple(sorted(int(member) for member in listed.split(b",") if member))


def read_group(job: str, row: Sequence[Any]) -> GroupView:
    group, split, task_index, environment, _, *episodes = row
    views = tuple(_read_episode(EpisodeKey(job, int(group), member), one) for member, one in enumerate(episodes))
    return GroupView(int(group), Split(split.decode()), int(task_index), int(environment), views)


def _read_episode(key: EpisodeKey, row: Sequence[Any]) -> EpisodeView:
    stage, worker, attempt, num_segments, size_bytes, version, failures, note = row
    return EpisodeView(
        key,
        Stage(stage.decode()),
        worker.decode() or None,
        attempt=int(attempt),
        num_segments=int(num_segments),
        size_bytes=int(size_bytes),
        oldest_version=int(version) if version else None,
        num_failures=int(failures),
        note=note.decode(),
    )


def read_awaited(row: Sequence[Any]) -> RewardWord | AwaitedReward:
    word, *rest = row
    if word:
        return RewardWord(word.decode())
    payload, kept, *items = rest
    triples = zip(items[::3], items[1::3], items[2::3], strict=True)
    posted = tuple(
        PostedReward(token.decode(), int(turn), float.fromhex(value.decode())) for token, turn, value in triples
    )
    return AwaitedReward(payload, kept, posted)


def read_dead_letter(job: str, entry_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    group, _, member = fields[b"episode"].decode().partition(":")
    name = entry_id.decode()
    written = datetime.fromtimestamp(int(name.partition("-")[0]) / 1000, UTC)
    return DeadLetter(
        name,
        EpisodeKey(job, int(group), int(member)),
        attempt=int(fields[b"attempt"]),
        num_segments=int(fields[b"segments"]),
        num_failures=int(fields[b"failures"]),
        reason=fields[b"reason"].decode(),
        created_at=written.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    )
