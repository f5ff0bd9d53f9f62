"""What bus and store of one installation share: plain values, as a Redis server would hold them.

The rule kept here: nothing is derived that could be counted, so that a reader sees at once whether the numbers of the
real server are right. It decides nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from gspo_core.types import Split, WeightsManifest
from services.state.events import JobEvent
from services.state.fleet_records import EngineRecord, EngineReport, TrainerRecord, WorkerRecord
from services.state.jobs import CancelManner, DesiredState, JobAttempt, JobStatus, StatusReason
from services.state.queue_records import DeadLetter, Snapshot, Stage

MAX_DEATHS = 3


@dataclass(slots=True)
class TwinSegment:
    position: int
    payload: bytes
    final: bool


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
    note: str = ""

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= MAX_DEATHS and len(self.segments) <= self.furthest

    @property
    def stored_bytes(self) -> int:
        return sum(len(segment.payload) for segment in self.segments)

    @property
    def snapshot_bytes(self) -> int:
        return len(self.snapshot.data) if self.snapshot else 0

    @property
    def charged_bytes(self) -> int:
        if self.stage in (Stage.DONE, Stage.DEAD):
            return self.stored_bytes
        return max(self.reserve, self.stored_bytes + self.snapshot_bytes)


@dataclass(slots=True)
class TwinGroup:
    split: Split
    task_index: int
    environment: int
    episodes: list[TwinEpisode]
    completion: int | None = None
    """In which place it became ready."""


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


@dataclass(slots=True)
class TwinJob:
    spec: str
    created_at: str
    owner: str = ""
    status: JobStatus = JobStatus.QUEUED
    desired_state: DesiredState = DesiredState.RUNNING
    cancel_manner: CancelManner | None = None
    settings_version: int = 0
    settings: str = "{}"
    attempts: list[JobAttempt] = field(default_factory=list)
    reason: StatusReason | None = None
    attempt: int = 0
    epoch: int = 0
    step: int = 0
    policy_version: int | None = None
    started_at: str | None = None
    finished_at: str | None = None
    trainer: str = ""
    """The token of its owner."""
    beat: int = 0
    barren_attempts: int = 0
    """Trainers in a row that made no new step."""
    furthest_step: int = -1
    versions: dict[int, WeightsManifest] = field(default_factory=dict)
    next_version: int = 0
    events: list[JobEvent] = field(default_factory=list)
    last_event: str = "0"
    last_trimmed: str | None = None
    environments: dict[int, str] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)


class World:
    """One installation."""

    def __init__(self) -> None:
        self.jobs: dict[str, TwinJob] = {}
        self.queues: dict[str, TwinQueue] = {}
        self.idempotency: dict[str, str] = {}
        self.lease_tokens: dict[str, str] = {}
        self.lease_beats: dict[str, int] = {}
        self.engines: dict[str, EngineRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.trainers: dict[str, TrainerRecord] = {}
        self.bindings: dict[str, tuple[str, int, str]] = {}
        """Engine -> job, epoch and token of who it is bound to."""
        self.engine_drains: set[str] = set()
        self.engine_states: dict[str, EngineReport] = {}
        """What the owner of an engine said of it."""
        self.news = asyncio.Condition()
        """Told of every append and every event."""

    def queue(self, job: str) -> TwinQueue:
        return self.queues.setdefault(job, TwinQueue())

    def owns(self, job: str, token: str) -> bool:
        """Whether ``token`` is that of the job's trainer."""
        return bool(token) and job in self.jobs and self.jobs[job].trainer == token
