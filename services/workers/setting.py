"""The setting that the episodes of one job share, and the order for one of them.

Rule: all of it comes from outside (clock and queue included) and is fixed before an episode starts, so that it can be
played anywhere.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gspo_core.chat import ChatCodec
from gspo_core.codec import EVIDENCE_SCHEMA
from gspo_core.environment_contract import Environment, Session
from gspo_core.evidence import of_environment
from gspo_core.judge_spec import JudgeSpec
from gspo_core.spec import EpisodeLimits, JobSpec
from gspo_core.types import EpisodeKey, Evidence, Outcome, Segment, Split, StopReason, TimeSplit
from services.episodes.metering import Counters, Timings
from services.episodes.outbox import Outbox
from services.episodes.policy import Policy
from services.process.tracing import NoSpans, Spans
from services.state.queue import Append, LeasedEpisode, Snapshot
from services.state.retry import Retrier
from services.workers.quarantine import Quarantine


class EpisodeRecords(Protocol):
    """The part of the queue that an episode needs besides appending."""

    async def read_episode(self, key: EpisodeKey) -> list[bytes]: ...

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[Append] = ()) -> None: ...

    async def save_snapshot(self, key: EpisodeKey, token: str, snapshot: Snapshot) -> None: ...

    async def read_snapshot(self, key: EpisodeKey) -> Snapshot | None: ...

    async def await_reward(self, token: str, end: Append, kept: bytes, deadline: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The state from which an attempt resumes."""

    record: Sequence[Segment] = ()
    snapshot: bytes | None = None
    """What was kept beside the segments, if it is needed."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class GoOn:
    """The attempt goes on from its segments, with what was kept beside them."""

    snapshot: bytes | None = None


@dataclass(frozen=True, slots=True)
class Rewind:
    """A new attempt begins with the first ``num_kept`` segments."""

    num_kept: int
    snapshot: bytes


@dataclass(frozen=True, slots=True)
class StartOver:
    """A new attempt begins with nothing."""

    counted_as: str = ""


class RecordedTokens(Protocol):
    """The tokens of an attempt, as far as they count for its end."""

    @property
    def num_sampled(self) -> int: ...

    @property
    def num_segments(self) -> int: ...

    @property
    def versions(self) -> Collection[int]: ...

    def close(self, outcome: Outcome, *, version: int = 0, spent: TimeSplit | None = None) -> Segment: ...


@dataclass(frozen=True, slots=True)
class AwaitsReward:
    """An episode that has ended and may still get a reward from outside."""

    stop: StopReason
    outcome: Outcome
    """Without a reward: what it is if none comes."""
    kept: bytes
    """For whoever makes the outcome with a reward."""
    deadline: float
    """Unix seconds."""


class Playing(Protocol):
    """One attempt of an episode."""

    @property
    def recorded(self) -> RecordedTokens: ...

    async def play(self) -> Outcome | AwaitsReward: ...


class Driver(Protocol):
    """What drives episodes: their environment here, or an agent that owns its loop."""

    def begin(
        self,
        setting: EpisodeSetting,
        order: EpisodeSpec,
        attempt: int,
        session: Session,
        past: ResumeState,
        timings: Timings,
    ) -> Playing: ...

    async def resume(
        self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int, record: Sequence[Segment]
    ) -> GoOn | Rewind | StartOver:
        """How an attempt goes on that another worker began; ``record`` is what it made durable."""
        ...

    async def has_kept(self, setting: EpisodeSetting, order: EpisodeSpec, attempt: int) -> bool:
        """Whether something of an attempt without a segment is durable all the same."""
        ...


async def nobody() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class EpisodeSetting:
    """Shared by the episodes of one job under one worker token."""

    driver: Driver
    codec: ChatCodec
    policy: Policy
    outbox: Outbox
    records: EpisodeRecords
    token: str
    retrier: Retrier
    counters: Counters
    clock: Callable[[], float]
    """Monotonic seconds."""
    leaving: asyncio.Event
    """Set when the worker leaves or the job is no longer served: episodes stop at their next boundary."""
    others_wait: Callable[[], Awaitable[bool]] = nobody
    """Whether an episode that gives up its place makes room for another."""
    spans: Spans = field(default_factory=NoSpans)
    """Traces the episode."""

    async def kept(self, key: EpisodeKey, attempt: int) -> Snapshot | None:
        """What is kept beside the segments of this attempt."""
        kept = await self.retrier.keep_trying(self.records.read_snapshot, key)
        return kept if kept is not None and kept.attempt == attempt else None


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play."""

    lease: LeasedEpisode
    environment: Environment
    limits: EpisodeLimits
    seed: int
    """The environment's seed, the same for all members of a group: they differ by their samples only."""
    temperature: float
    broken_reward: float
    """For an episode that the policy itself broke."""
    max_turn_tokens: int
    """Sampled tokens of one turn."""
    max_context_tokens: int
    """Read and sampled tokens together."""
    chunk_tokens: int
    model_context_tokens: int = 0
    """The model's own limit for them."""
    lease_tokens: int | None = None
    """Sampled in one go while others wait."""
    lease_s: float | None = None
    """Held in one go while others wait."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """For its environment."""
    agent_lives_elsewhere: bool = False
    """It is a service of its own, which outlives this process."""
    reward_deadline_s: float | None = None
    """How long its reward may come after its end; None: not at all."""
    agent_pulls: bool = False
    """It fetches the episode by itself."""
    judge: JudgeSpec | None = None
    """The model that is asked for its reward."""
    rewards_from: Literal["returned", "judge", "posted"] | None = None
    """Where its agent's job says that its reward comes from."""
    reward_range: tuple[float, float] | None = None
    """That its environment states."""
    trains_rejected: bool = False
    """Also samples beside the one that its agent went on from."""
    says_unsupported: bool = False
    """Fields of requests that are not acted on are said, and not refused."""
    volatile: Mapping[str, str] = field(default_factory=dict)
    """Patterns of what its agent writes anew into each request, by their names."""
    evidence_bytes: int = 0
    """Kept of what its reward was made from."""
    is_one_of_several: bool = False
    """Its environment, so the evidence has to name it."""

    @property
    def key(self) -> EpisodeKey:
        return self.lease.key

    @classmethod
    def from_spec(
        cls,
        spec: JobSpec,
        environment: Environment,
        lease: LeasedEpisode,
        model_context_tokens: int,
        quarantine: Quarantine | None = None,
    ) -> EpisodeSpec:
        limits = spec.episode_limits(lease.environment, environment.limits)
        agent = spec.environments[lease.environment].agent
        is_training = lease.split is Split.TRAIN
        keeps_evidence = is_training and lease.reads >= EVIDENCE_SCHEMA  # a trainer of before would refuse the segment
        return cls(
            lease=lease,
            environment=environment,
            limits=limits,
            seed=episode_seed(spec.seed, lease.key.group),
            broken_reward=_broken_reward(spec, lease.environment, environment),
            temperature=spec.sampling.temperature if is_training else spec.evaluation_temperature,
            max_turn_tokens=spec.sampling.max_new_tokens,
            max_context_tokens=min(limits.max_context_tokens, model_context_tokens),
            chunk_tokens=spec.rollout.chunk_tokens,
            model_context_tokens=model_context_tokens,
            lease_tokens=spec.rollout.lease_tokens,
            lease_s=spec.rollout.lease_s,
            quarantine=quarantine or Quarantine(),
            agent_lives_elsewhere=agent is not None and agent.lives_elsewhere,
            agent_pulls=agent is not None and agent.pull,
            judge=None if agent is None else agent.judge,
            rewards_from=None if agent is None else agent.rewards,
            trains_rejected=agent is not None and agent.rejected == "train",
            says_unsupported=agent is not None and agent.unsupported == "say",
            volatile={} if agent is None else agent.volatile,
            reward_range=None if agent is None else environment.reward_range,
            reward_deadline_s=spec.rewards.deadline_s,
            evidence_bytes=spec.rewards.evidence_bytes if keeps_evidence else 0,
            is_one_of_several=len(spec.environments) > 1,
        )

    def told_of(self, evidence: Evidence) -> Evidence:
        """``evidence`` as it is kept."""
        if not self.evidence_bytes or not self.is_one_of_several:
            return evidence
        return of_environment(self.lease.environment, evidence, self.evidence_bytes)


def _broken_reward(spec: JobSpec, number: int, environment: Environment) -> float:
    given = spec.environments[number].broken_reward
    return given if given is not None else (environment.reward_range or (0.0, 0.0))[0]


def episode_seed(job_seed: int, group: int) -> int:
    """31 bits, the same on every worker and in every attempt."""
    digest = hashlib.blake2b(f"{job_seed}/{group}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
