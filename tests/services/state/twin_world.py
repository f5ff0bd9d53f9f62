"""What the queue's twin and its jobs share: plain values, as a Redis server would hold them.

The rule kept here: nothing is derived that could be counted, so that a reader sees at once whether the numbers of the
real server are right. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from gspo_core.types import EpisodeKey, Split
from services.state.queue_records import DeadLetter, PostedReward, Snapshot, Stage
from services.state.refusals import EpisodeErased, Fenced

MAX_DEATHS = 3


@dataclass(slots=True)
class TwinSegment:
    position: int
    payload: bytes
    final: bool


@dataclass(slots=True)
class TwinAwaited:
    """The end of an episode that waits for its reward."""

    by: str
    """The token that set it aside."""
    payload: bytes
    kept: bytes
    deadline: float
    posted: list[PostedReward] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        items = (f"{one.token}{one.turn}{one.value.hex()}" for one in self.posted)
        return len(self.payload) + len(self.kept) + sum(map(len, items))


@dataclass(slots=True)
class TwinEpisode:
    sequence: int
    """Of its dispatch, or of its last interruption."""
    reserve: int
    attempt: int = 0
    token: str = ""
    """Of the worker that holds it, or that ended it; empty while it is queued or dead."""
    stage: Stage = Stage.QUEUED
    came_back: bool = False
    version: int | None = None
    """The oldest one that sampled a token of it."""
    failures: int = 0
    deaths: int = 0
    """Of its workers, in a row and without progress."""
    furthest: int = 0
    segments: list[TwinSegment] = field(default_factory=list)
    snapshot: Snapshot | None = None
    last_part: bytes | None = None
    """Of the snapshot, where its last piece was added as a part."""
    note: str = ""
    awaited: TwinAwaited | None = None
    """While it waits for its reward."""
    is_erased: bool = False

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= MAX_DEATHS and len(self.segments) <= self.furthest

    @property
    def stored_bytes(self) -> int:
        return sum(len(segment.payload) for segment in self.segments)

    @property
    def snapshot_bytes(self) -> int:
        if self.snapshot:
            return len(self.snapshot.data) + sum(map(len, self.snapshot.parts))
        return self.awaited.num_bytes if self.awaited else 0

    @property
    def charged_bytes(self) -> int:
        if self.stage in (Stage.DONE, Stage.DEAD):
            return self.stored_bytes
        if self.awaited is not None:
            return self.stored_bytes + self.awaited.num_bytes
        return max(self.reserve, self.stored_bytes + self.snapshot_bytes)


@dataclass(slots=True)
class TwinGroup:
    split: Split
    task_index: int
    environment: int
    episodes: list[TwinEpisode]
    epoch: int
    reads: int
    completion: int | None = None
    """In which place it became ready."""
    num_waited: int = 0
    """Members that had waited for their reward when they ended."""
    sealed_by: str = ""
    """The trainer that last wrote it into a batch log, or was about to."""


@dataclass(slots=True)
class TwinQueue:
    """The queue of one job."""

    groups: dict[int, TwinGroup] = field(default_factory=dict)
    sequence: int = 0
    completions: int = 0
    last_position: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    holders: dict[str, str] = field(default_factory=dict)
    """Token -> worker, of all that ever leased."""
    dead_letters: list[DeadLetter] = field(default_factory=list)
    num_dead_letters: int = 0
    tokens_posted: dict[tuple[EpisodeKey, int, str], str] = field(default_factory=dict)
    """Tokens of rewards that were taken late."""
    num_late: int = 0
    num_missed: int = 0


class World:
    """One installation."""

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        """Job -> token of its trainer; empty while it has none."""
        self.epochs: Counter[str] = Counter()
        """Job -> how many trainers claimed it."""
        self.queues: dict[str, TwinQueue] = {}
        self.lease_tokens: dict[str, str] = {}
        self.lease_beats: dict[str, int] = {}
        self.news = asyncio.Condition()
        """Told of every append."""

    def queue(self, job: str) -> TwinQueue:
        return self.queues.setdefault(job, TwinQueue())

    def owns(self, job: str, token: str) -> bool:
        """Whether ``token`` is that of the job's trainer."""
        return bool(token) and self.owners.get(job) == token


def fenced(episode: TwinEpisode | None, what: str) -> Fenced:
    """The refusal of whoever does not hold the episode any more."""
    return EpisodeErased(what) if episode is not None and episode.is_erased else Fenced(what)
