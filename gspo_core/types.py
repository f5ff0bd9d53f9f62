"""The nouns that every part of the system shares, as frozen values whose invariants hold from construction on.

One rule is kept here and carries the whole design:

    Every sampled token carries the log-prob that it was sampled with and the version that sampled it.
    A segment has exactly one version.

For an episode made of segments the stitched behaviour log-probs are therefore exact, so the sequence ratio
``log s = sum(policy - anchor) / num_actions`` holds whatever the number of versions, and where an episode is cut
never changes the loss.

This module does no I/O, knows no clock, and stays importable without numpy: arrays are coerced when a value is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A sampled token's log-prob is at most 0; float32 log-softmax overshoots by rounding only.
MAX_LOGPROB = 1e-4


class InvalidValue(ValueError):
    """A noun was built from values that break its invariants."""


class StopReason(StrEnum):
    """Why an episode ended (``docs/environments.md`` says how each class is trained)."""

    COMPLETED = "completed"
    TOOL_STOPPED = "tool_stopped"
    ENV_DONE = "env_done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"
    PARSE_ERROR = "parse_error"
    TOOL_TIMEOUT = "tool_timeout"
    ENV_CRASH = "env_crash"
    ENV_ERROR = "env_error"
    EPISODE_TIMEOUT = "episode_timeout"
    CANCELLED = "cancelled"
    STALE = "stale"

    @property
    def has_reward(self) -> bool:
        """Infrastructure failures and cancelled episodes have no reward; they are never trained as reward 0."""
        return self not in _WITHOUT_REWARD


_WITHOUT_REWARD = frozenset({StopReason.ENV_ERROR, StopReason.CANCELLED})


class CacheMode(StrEnum):
    """Whether the tokens were sampled on key-value entries of their own version only."""

    FRESH = "fresh"
    STALE = "stale"


class Split(StrEnum):
    """What an episode is for: training or held-out evaluation."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, order=True)
class EpisodeKey:
    """Names one episode: member ``member`` of group ``group`` of job ``job``."""

    job: str
    group: int
    member: int

    def __post_init__(self) -> None:
        if not self.job or "/" in self.job:
            raise InvalidValue(f"a job id is a non-empty string without '/', not {self.job!r}")
        if self.group < 0 or self.member < 0:
            raise InvalidValue(f"group and member count from 0, not {self.group} and {self.member}")

    def __str__(self) -> str:
        return f"{self.job}/{self.group}/{self.member}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str(key)``."""
        parts = text.split("/")
        if len(parts) != 3 or not all(part.isdecimal() for part in parts[1:]):
            raise InvalidValue(f"an episode key reads JOB/GROUP/MEMBER, not {text!r}")
        return cls(parts[0], int(parts[1]), int(parts[2]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended. ``reward`` is None exactly when the stop reason says that there is none."""

    stop_reason: StopReason
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_reason", StopReason(self.stop_reason))
        if self.stop_reason.has_reward != (self.reward is not None):
            raise InvalidValue(f"stop reason {self.stop_reason} with reward {self.reward}")
        for name, value in [("reward", self.reward or 0.0), *self.reward_parts.items(), *self.metrics.items()]:
            if not math.isfinite(value):
                raise InvalidValue(f"{name} is not a finite number: {value}")
        object.__setattr__(self, "reward_parts", MappingProxyType(dict(self.reward_parts)))
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))


@dataclass(frozen=True, eq=False)
class Segment:
    """A piece of an episode on the wire: tokens in order, those with ``action_mask`` sampled by ``version``."""

    key: EpisodeKey
    attempt: int
    """Counts from 0; a new attempt starts the episode again."""
    branch: int
    """Counts from 0; a rewritten history starts a new branch."""
    index: int
    """Position in the attempt, counting from 0 without gaps."""
    turn: int
    """The assistant turn that these tokens lead to or belong to, counting from 0."""
    version: int
    """The one version that sampled every action of this segment."""
    temperature: float
    engine_id: str
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    """True where the policy sampled the token; prompts and tool output are False."""
    behavior_logprobs: NDArray[np.float32]
    """As recorded when sampled, at the sampling temperature; 0 where the mask is False."""
    cache_mode: CacheMode = CacheMode.FRESH
    turn_reward: float | None = None
    outcome: Outcome | None = None
    """Only on the last segment of an episode."""

    def __post_init__(self) -> None:
        self._check_scalars()
        token_ids = _frozen_array(self.token_ids, "int32", "token_ids")
        action_mask = _frozen_array(self.action_mask, "bool", "action_mask")
        behavior_logprobs = _frozen_array(self.behavior_logprobs, "float32", "behavior_logprobs")
        if not len(token_ids) == len(action_mask) == len(behavior_logprobs):
            raise InvalidValue(
                f"{len(token_ids)} tokens, {len(action_mask)} mask entries, {len(behavior_logprobs)} log-probs"
            )
        if not len(token_ids) and self.outcome is None:
            raise InvalidValue("a segment without tokens must carry the outcome")
        if len(token_ids) and token_ids.min() < 0:
            raise InvalidValue("token ids are not negative")
        _check_logprobs(action_mask, behavior_logprobs)
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "action_mask", action_mask)
        object.__setattr__(self, "behavior_logprobs", behavior_logprobs)
        object.__setattr__(self, "cache_mode", CacheMode(self.cache_mode))

    def _check_scalars(self) -> None:
        for name in ("attempt", "branch", "index", "turn", "version"):
            if getattr(self, name) < 0:
                raise InvalidValue(f"{name} counts from 0, not {getattr(self, name)}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InvalidValue(f"the sampling temperature is positive, not {self.temperature}")
        if self.turn_reward is not None and not math.isfinite(self.turn_reward):
            raise InvalidValue(f"turn_reward is not a finite number: {self.turn_reward}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def num_actions(self) -> int:
        return int(self.action_mask.sum())

    @cached_property
    def logprob_sum(self) -> float:
        """Sum of the behaviour log-probs in float64; with ``num_actions`` it checks a segment end to end."""
        return float(self.behavior_logprobs.sum(dtype="float64"))

    @property
    def is_final(self) -> bool:
        return self.outcome is not None

    def _scalars(self) -> tuple[object, ...]:
        return (
            *(self.key, self.attempt, self.branch, self.index, self.turn, self.version),
            *(self.temperature, self.engine_id, self.cache_mode, self.turn_reward, self.outcome),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        return (
            self._scalars() == other._scalars()
            and self.token_ids.tobytes() == other.token_ids.tobytes()
            and self.action_mask.tobytes() == other.action_mask.tobytes()
            and self.behavior_logprobs.tobytes() == other.behavior_logprobs.tobytes()
        )

    def __hash__(self) -> int:
        return hash((self.key, self.attempt, self.index))


@dataclass(frozen=True, eq=False)
class Branch:
    """One training sequence: the segments of one history of an episode, stitched."""

    segments: tuple[Segment, ...]

    @cached_property
    def token_ids(self) -> NDArray[np.int32]:
        return self._stitch("token_ids")

    @cached_property
    def action_mask(self) -> NDArray[np.bool_]:
        return self._stitch("action_mask")

    @cached_property
    def behavior_logprobs(self) -> NDArray[np.float32]:
        return self._stitch("behavior_logprobs")

    @cached_property
    def versions(self) -> NDArray[np.int32]:
        """The version of each token (of the segment that holds it)."""
        return self._repeat("version")

    @cached_property
    def turn_ids(self) -> NDArray[np.int32]:
        return self._repeat("turn")

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)

    def _stitch(self, name: str) -> NDArray[Any]:
        import numpy as np

        return np.concatenate([getattr(segment, name) for segment in self.segments])

    def _repeat(self, name: str) -> NDArray[np.int32]:
        import numpy as np

        values = np.array([getattr(segment, name) for segment in self.segments], dtype=np.int32)
        return np.repeat(values, [segment.num_tokens for segment in self.segments])


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One finished attempt of an episode: its segments in order, the last one carrying the outcome."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise InvalidValue("a trajectory has at least one segment")
        first = self.segments[0]
        for position, segment in enumerate(self.segments):
            if (segment.key, segment.attempt, segment.index) != (first.key, first.attempt, position):
                raise InvalidValue(
                    f"segment {segment.index} of {segment.key} attempt {segment.attempt} stands at position "
                    f"{position} of a trajectory of {first.key} attempt {first.attempt}"
                )
            if segment.is_final != (position == len(self.segments) - 1):
                raise InvalidValue(f"{first.key}: the last segment, and no other, carries the outcome")

    @property
    def key(self) -> EpisodeKey:
        return self.segments[0].key

    @property
    def attempt(self) -> int:
        return self.segments[0].attempt

    @property
    def outcome(self) -> Outcome:
        outcome = self.segments[-1].outcome
        assert outcome is not None
        return outcome

    @property
    def reward(self) -> float | None:
        return self.outcome.reward

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """One per history that holds actions, in order."""
        numbers = dict.fromkeys(segment.branch for segment in self.segments)
        branches = (Branch(tuple(s for s in self.segments if s.branch == number)) for number in numbers)
        return tuple(branch for branch in branches if branch.num_actions)

    @property
    def num_actions(self) -> int:
        return sum(segment.num_actions for segment in self.segments)

    @property
    def num_turns(self) -> int:
        return 1 + max(segment.turn for segment in self.segments)

    @property
    def versions(self) -> frozenset[int]:
        """Versions that sampled at least one token of it."""
        return frozenset(segment.version for segment in self.segments if segment.num_actions)


@dataclass(frozen=True, eq=False)
class Group:
    """The finished episodes of one task; members may be missing, because failures are data."""

    job: str
    group: int
    split: Split
    task_index: int
    size: int
    """How many members were dispatched."""
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        members = [trajectory.key.member for trajectory in self.trajectories]
        if members != sorted(set(members)) or any(member >= self.size for member in members):
            raise InvalidValue(f"group {self.group} of size {self.size} cannot have the members {members}")
        for trajectory in self.trajectories:
            if (trajectory.key.job, trajectory.key.group) != (self.job, self.group):
                raise InvalidValue(f"{trajectory.key} is no member of group {self.group} of {self.job}")

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """One per finished member, None for those that have no reward."""
        return tuple(trajectory.reward for trajectory in self.trajectories)


@dataclass(frozen=True, slots=True)
class WeightFile:
    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """What a published version consists of. Versions count publishes and are never reused."""

    job: str
    version: int
    epoch: int
    step: int
    files: tuple[WeightFile, ...]

    def __post_init__(self) -> None:
        if not self.files:
            raise InvalidValue("a version has at least one file")
        if min(self.version, self.epoch, self.step) < 0:
            raise InvalidValue("version, epoch and step count from 0")

    @property
    def label(self) -> str:
        """What an engine that holds these weights must report."""
        return f"{self.job}/{self.epoch}/{self.version}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything a person needs to trust a step. All numbers are finite; shares lie in [0, 1]."""

    step: int
    version: int
    """The version that this step published."""
    epoch: int
    metrics: Mapping[str, float]
    """Named as the metrics of the REST API, e.g. ``reward/mean``, ``gspo/clip_frac``, ``staleness/max``."""

    def __post_init__(self) -> None:
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise InvalidValue(f"metric {name} is not a finite number: {value}")
        object.__setattr__(self, "metrics", MappingProxyType(dict(self.metrics)))


def _frozen_array(values: Sequence[Any] | NDArray[Any], dtype: str, name: str) -> NDArray[Any]:
    """A read-only one-dimensional array of ``dtype``; refuses values that the type cannot hold exactly."""
    import numpy as np

    given = np.asarray(values)
    if given.ndim != 1:
        raise InvalidValue(f"{name} has one dimension, not {given.ndim}")
    if given.dtype == dtype and not given.flags.writeable:
        return given
    if dtype == "int32" and given.size and given.dtype != dtype:
        _check_integers(given, name)
    if dtype == "bool" and given.size and given.dtype != dtype and not np.isin(given, (0, 1)).all():
        raise InvalidValue(f"{name} holds something else than 0 and 1")
    array = given.astype(dtype)
    array.flags.writeable = False
    return array


def _check_integers(given: NDArray[Any], name: str) -> None:
    if given.dtype.kind not in "iu":
        raise InvalidValue(f"{name} holds whole numbers, not {given.dtype}")
    if given.max() > 2**31 - 1 or given.min() < -(2**31):
        raise InvalidValue(f"{name} does not fit into 32 bits")


def _check_logprobs(action_mask: NDArray[np.bool_], behavior_logprobs: NDArray[np.float32]) -> None:
    if not behavior_logprobs.size:
        return
    # One comparison each finds NaN (false in every comparison), -inf and +inf.
    if not (behavior_logprobs.max() <= MAX_LOGPROB and behavior_logprobs.min() > -math.inf):
        raise InvalidValue("behaviour log-probs are finite and not positive")
    if (behavior_logprobs != 0)[~action_mask].any():
        raise InvalidValue("behaviour log-probs are 0 where the action mask is False")
