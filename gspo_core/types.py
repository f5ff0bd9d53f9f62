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
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

from gspo_core.engine_label import EngineLabel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = np.int32 | np.bool_ | np.float32
    ScalarT = TypeVar("ScalarT", bound=np.generic)

_EnumT = TypeVar("_EnumT", bound=StrEnum)

# A sampled token's log-prob is at most 0; float32 log-softmax overshoots by rounding only.
MAX_LOGPROB = 1e-4
# Attempts, branches, indexes, turns and versions become int32 arrays when segments are stitched.
MAX_COUNT = 2**31 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class InvalidValue(ValueError):
    """A noun was built from values that break its invariants."""


class NonFiniteValue(InvalidValue):
    """A number that must be finite is NaN or infinite."""


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
    REPETITION = "repetition"
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
        if type(self.job) is not str or not self.job or "/" in self.job or not self.job.isprintable():
            raise InvalidValue(f"a job id is a non-empty printable string without '/', not {self.job!r}")
        _check_count("group", self.group, 2**63 - 1)
        _check_count("member", self.member)

    def __str__(self) -> str:
        return f"{self.job}/{self.group}/{self.member}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str(key)``."""
        parts = text.split("/")
        if len(parts) == 3 and all(part.isdecimal() and len(part) < 20 for part in parts[1:]):
            key = cls(parts[0], int(parts[1]), int(parts[2]))
            # One key has one spelling: leading zeros and foreign digits would name it twice.
            if str(key) == text:
                return key
        raise InvalidValue(f"an episode key reads JOB/GROUP/MEMBER, not {text!r}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended. ``reward`` is None exactly when the stop reason says that there is none."""

    stop_reason: StopReason
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_reason", _member(StopReason, self.stop_reason))
        if self.stop_reason.has_reward != (self.reward is not None):
            raise InvalidValue(f"stop reason {self.stop_reason} with reward {self.reward}")
        if self.reward is not None:
            object.__setattr__(self, "reward", _finite("reward", self.reward))
        object.__setattr__(self, "reward_parts", _finite_mapping("reward_parts", self.reward_parts))
        object.__setattr__(self, "metrics", _finite_mapping("metrics", self.metrics))


class Spent(NamedTuple):
    """Seconds that went by for a piece of an episode, since the piece before it."""

    engine_s: float
    """Sampling it."""
    env_s: float
    """The environment, with what led to it."""
    queue_s: float
    """Waiting: no engine could take the request, or the environment had no free place."""


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
    spent: Spent | None = None
    """Where the time went, as far as it was recorded."""
    untrained_turns: tuple[int, ...] = ()
    """Only on the last segment: the turns, in order, that were sampled and never had by anyone, so they are no actions
    of the episode."""
    num_actions: int = field(init=False)
    """How many tokens the policy sampled. With ``logprob_sum`` it checks a segment end to end."""
    logprob_sum: float = field(init=False)
    """Sum of the behaviour log-probs in float64."""

    def __post_init__(self) -> None:
        for name in ("attempt", "branch", "index", "turn", "version"):
            _check_count(name, getattr(self, name))
        if type(self.engine_id) is not str:
            raise InvalidValue(f"engine_id is a string, not {self.engine_id!r}")
        vars(self).update(
            temperature=_number("temperature", self.temperature),
            token_ids=_frozen_array(self.token_ids, "int32", "token_ids"),
            action_mask=_frozen_array(self.action_mask, "bool", "action_mask"),
            behavior_logprobs=_frozen_array(self.behavior_logprobs, "float32", "behavior_logprobs"),
            cache_mode=_member(CacheMode, self.cache_mode),
            turn_reward=None if self.turn_reward is None else _number("turn_reward", self.turn_reward),
            spent=None if self.spent is None else Spent(*(_number("spent", second) for second in self.spent)),
            untrained_turns=tuple(self.untrained_turns),
        )
        self._check()

    @classmethod
    def of_exact(cls, fields: dict[str, Any]) -> Self:
        """A segment of values, one for each field, that have exactly the types of the fields, arrays read-only.

        Decoders have such values. Nothing is converted, which is faster; every invariant is checked all the same.
        """
        segment = object.__new__(cls)
        vars(segment).update(fields)
        segment._check()
        return segment

    def _check(self) -> None:
        """Check every invariant of values that have the right types, and derive the two sums."""
        counts = (self.attempt, self.branch, self.index, self.turn, self.version)
        if min(counts) < 0 or max(counts) > MAX_COUNT:
            raise InvalidValue(f"attempt, branch, index, turn and version lie from 0 to {MAX_COUNT}, not {counts}")
        if not 0 < self.temperature < math.inf:
            kind = InvalidValue if math.isfinite(self.temperature) else NonFiniteValue
            raise kind(f"the sampling temperature is positive and finite, not {self.temperature}")
        if self.turn_reward is not None and not math.isfinite(self.turn_reward):
            raise NonFiniteValue(f"turn_reward is not a finite number: {self.turn_reward}")
        if self.spent is not None and not all(0.0 <= second < math.inf for second in self.spent):
            kind = InvalidValue if all(map(math.isfinite, self.spent)) else NonFiniteValue
            raise kind(f"spent holds finite seconds, none below 0, not {tuple(self.spent)}")
        if self.untrained_turns:
            self._check_untrained()
        num_tokens = len(self.token_ids)
        if not num_tokens == len(self.action_mask) == len(self.behavior_logprobs):
            raise InvalidValue(
                f"{num_tokens} tokens, {len(self.action_mask)} mask entries, {len(self.behavior_logprobs)} log-probs"
            )
        if not num_tokens and self.outcome is None:
            raise InvalidValue("a segment without tokens must carry the outcome")
        num_actions, logprob_sum = _checked_sums(self.token_ids, self.action_mask, self.behavior_logprobs)
        fields = vars(self)
        fields["num_actions"] = num_actions
        fields["logprob_sum"] = logprob_sum

    def _check_untrained(self) -> None:
        if self.outcome is None:
            raise InvalidValue("only the last segment names untrained turns")
        for turn in self.untrained_turns:
            _check_count("an untrained turn", turn)
        if list(self.untrained_turns) != sorted(set(self.untrained_turns)):
            raise InvalidValue(f"untrained turns are named once and in order, not {self.untrained_turns}")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_final(self) -> bool:
        return self.outcome is not None

    def _scalars(self) -> tuple[EpisodeKey | int | float | str | Outcome | Spent | tuple[int, ...] | None, ...]:
        return (
            *(self.key, self.attempt, self.branch, self.index, self.turn, self.version),
            *(self.temperature, self.engine_id, self.cache_mode, self.turn_reward, self.outcome, self.spent),
            self.untrained_turns,
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
    untrained_turns: frozenset[int] = frozenset()
    """What was sampled in them is read, and no action."""

    @cached_property
    def token_ids(self) -> NDArray[np.int32]:
        return self._stitch([segment.token_ids for segment in self.segments])

    @cached_property
    def action_mask(self) -> NDArray[np.bool_]:
        return self._stitch([self._acted(segment, segment.action_mask) for segment in self.segments])

    @cached_property
    def behavior_logprobs(self) -> NDArray[np.float32]:
        return self._stitch([self._acted(segment, segment.behavior_logprobs) for segment in self.segments])

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
        return sum(segment.num_actions for segment in self.segments if segment.turn not in self.untrained_turns)

    def _acted(self, segment: Segment, values: NDArray[ScalarT]) -> NDArray[ScalarT]:
        """``values`` of the actions; zeros where the turn is untrained."""
        import numpy as np

        return np.zeros_like(values) if segment.turn in self.untrained_turns else values

    def _stitch(self, pieces: Sequence[NDArray[ScalarT]]) -> NDArray[ScalarT]:
        import numpy as np

        return np.concatenate(pieces)

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
        untrained = frozenset(self.segments[-1].untrained_turns)
        branches = (Branch(tuple(s for s in self.segments if s.branch == number), untrained) for number in numbers)
        return tuple(branch for branch in branches if branch.num_actions)

    @property
    def num_actions(self) -> int:
        """Sampled tokens, also those of untrained turns."""
        return sum(segment.num_actions for segment in self.segments)

    @property
    def num_trained(self) -> int:
        """Sampled tokens of the turns that are trained."""
        return sum(branch.num_actions for branch in self.branches)

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
    """Relative to the directory of the version, with ``/``."""
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        parts = self.path.split("/") if type(self.path) is str else [""]
        if not {"", ".", ".."}.isdisjoint(parts):
            raise InvalidValue(f"the path of a weight file stays inside its version, {self.path!r} does not")
        _check_count("size_bytes", self.size_bytes, 2**63 - 1)
        if type(self.sha256) is not str or not _SHA256.fullmatch(self.sha256):
            raise InvalidValue(f"a sha256 is 64 lower-case hexadecimal digits, not {self.sha256!r}")


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
        for name in ("version", "epoch", "step"):
            _check_count(name, getattr(self, name))

    @property
    def label(self) -> str:
        """What an engine that holds these weights must report."""
        return str(EngineLabel(self.job, self.epoch, self.version))


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
        object.__setattr__(self, "metrics", _finite_mapping("metrics", self.metrics))


def _check_count(name: str, value: int, maximum: int = MAX_COUNT) -> None:
    # Exactly int: numpy integers and booleans would not survive JSON and msgpack as they are.
    if type(value) is not int or not 0 <= value <= maximum:
        raise InvalidValue(f"{name} is an int from 0 to {maximum}, not {value!r}")


def _number(name: str, value: float) -> float:
    """``value`` as a plain float, so that numpy scalars and integers mean the same everywhere."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue(f"{name} is not a number: {value!r}") from error


def _finite(name: str, value: float) -> float:
    number = _number(name, value)
    if not math.isfinite(number):
        raise NonFiniteValue(f"{name} is not a finite number: {value}")
    return number


def _finite_mapping(name: str, values: Mapping[str, float]) -> Mapping[str, float]:
    for key in values:
        if type(key) is not str:
            raise InvalidValue(f"{name} has the key {key!r}, which is not a string")
    return MappingProxyType({key: _finite(f"{name}[{key}]", value) for key, value in values.items()})


def _member(kind: type[_EnumT], value: str) -> _EnumT:
    try:
        return kind(value)
    except ValueError as error:
        raise InvalidValue(f"{value!r} is no {kind.__name__}; known: {', '.join(kind)}") from error


def _frozen_array(values: Sequence[float] | NDArray[Numbers], dtype: str, name: str) -> NDArray[Numbers]:
    """A read-only contiguous one-dimensional array of ``dtype``; copies unless ``values`` is one already."""
    import numpy as np

    given = np.asarray(values)
    if given.ndim != 1:
        raise InvalidValue(f"{name} has one dimension, not {given.ndim}")
    if given.dtype == _dtype(dtype):
        flags = given.flags
        if flags.c_contiguous and not flags.writeable:
            return given
        array = given.copy()
    else:
        array = _converted(given, dtype, name)
    array.flags.writeable = False
    return array


@cache
def _dtype(name: str) -> np.dtype[Numbers]:
    import numpy as np

    return np.dtype(name)


def _converted(given: NDArray[Numbers], dtype: str, name: str) -> NDArray[Numbers]:
    import numpy as np

    if given.size:
        if given.dtype.kind not in {"int32": "iu", "bool": "iuf", "float32": "fiu"}[dtype]:
            raise InvalidValue(f"{name} cannot be made {dtype} from {given.dtype}")
        if dtype == "int32" and (given.max() > 2**31 - 1 or given.min() < -(2**31)):
            raise InvalidValue(f"{name} does not fit into 32 bits")
        if dtype == "bool" and not np.isin(given, (0, 1)).all():
            raise InvalidValue(f"{name} holds something else than 0 and 1")
    # Values beyond float32 become infinite here and are refused as such, without a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        return given.astype(dtype, order="C")


def _checked_sums(
    token_ids: NDArray[np.int32], action_mask: NDArray[np.bool_], behavior_logprobs: NDArray[np.float32]
) -> tuple[int, float]:
    """The number of actions and the sum of their log-probs, after checking the arrays against each other."""
    import numpy as np

    if not token_ids.size:
        return 0, 0.0
    # Reductions are called on the ufuncs: each array method costs a Python frame more, and this is the hot path.
    if np.minimum.reduce(token_ids) < 0:
        raise InvalidValue("token ids are not negative")
    # The maximum is NaN if there is one, and then no comparison holds; what is left for the sum to find is -inf.
    # In this order no bit pattern makes numpy warn.
    largest = float(np.maximum.reduce(behavior_logprobs))
    if not largest <= MAX_LOGPROB:
        kind = InvalidValue if math.isfinite(largest) else NonFiniteValue
        raise kind(f"behaviour log-probs are finite and not positive; the largest is {largest}")
    logprob_sum = float(np.add.reduce(behavior_logprobs, dtype=np.float64))
    if not math.isfinite(logprob_sum):
        raise NonFiniteValue("a behaviour log-prob is infinite")
    misplaced = np.greater(behavior_logprobs != np.float32(0), action_mask)
    if b"\1" in misplaced.tobytes():
        raise InvalidValue("behaviour log-probs are 0 where the action mask is False")
    return int(np.count_nonzero(action_mask)), logprob_sum
