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
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

from gspo_core.invariants import (
    MAX_COUNT,
    InvalidValue,
    NonFiniteValue,
    check_count,
    checked_sums,
    finite,
    finite_mapping,
    frozen_array,
    member,
    plain_number,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers: TypeAlias = np.int32 | np.bool_ | np.float32
    ScalarT = TypeVar("ScalarT", bound=np.generic)


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
    NO_REWARD = "no_reward"
    STALE = "stale"

    @property
    def has_reward(self) -> bool:
        """Infrastructure failures, cancelled episodes and those whose reward never came have none; they are never
        trained as reward 0."""
        return self not in _WITHOUT_REWARD


_WITHOUT_REWARD = frozenset({StopReason.ENV_ERROR, StopReason.CANCELLED, StopReason.NO_REWARD})


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
        check_count("group", self.group, 2**63 - 1)
        check_count("member", self.member)

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
class Evidence:
    """What a reward was made from (``gspo_core.evidence``)."""

    told: Mapping[str, str] = field(default_factory=dict)
    """Values by name, as text."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Names that are not in ``told``, with the reason."""

    def __post_init__(self) -> None:
        for name in ("told", "left_out"):
            given = getattr(self, name)
            if not all(type(one) is str for pair in given.items() for one in pair):
                raise InvalidValue(f"{name} of an evidence has texts by name")
            object.__setattr__(self, name, MappingProxyType(dict(given)))
        if self.num_bytes > MAX_EVIDENCE_BYTES:
            raise InvalidValue(f"evidence of {self.num_bytes} bytes; at most {MAX_EVIDENCE_BYTES} are kept")

    def __bool__(self) -> bool:
        return bool(self.told or self.left_out)

    @property
    def num_bytes(self) -> int:
        return sum(len(name) + len(text) for name, text in self.told.items())

    def value(self, name: str) -> object:
        """Raises KeyError, NotPlain."""
        from gspo_core.evidence import value_of  # few look at it

        return value_of(self.told[name])

    @property
    def state(self) -> dict[str, object]:
        """The attributes of the world before it was judged, as far as they were kept. Raises NotPlain."""
        from gspo_core.evidence import state_in

        return state_in(self)


# A segment has at most 4 MiB, and a step hundreds of them.
MAX_EVIDENCE_BYTES = 262_144
NOTHING = Evidence()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended. ``reward`` is None exactly when the stop reason says that there is none."""

    stop_reason: StopReason
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    evidence: Evidence = NOTHING
    """What the reward was made from, as far as it was kept."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_reason", member(StopReason, self.stop_reason))
        if self.stop_reason.has_reward != (self.reward is not None):
            raise InvalidValue(f"stop reason {self.stop_reason} with reward {self.reward}")
        if self.reward is not None:
            object.__setattr__(self, "reward", finite("reward", self.reward))
        object.__setattr__(self, "reward_parts", finite_mapping("reward_parts", self.reward_parts))
        object.__setattr__(self, "metrics", finite_mapping("metrics", self.metrics))


class TimeSplit(NamedTuple):
    """Seconds that went by for a piece of an episode, since the piece before it."""

    engine_s: float
    """Sampling it."""
    env_s: float
    """The environment, with what led to it."""
    queue_s: float
    """Waiting: no engine could take the request, or the environment had no free place."""


class TurnReward(NamedTuple):
    """What one turn was paid."""

    turn: int
    reward: float


class Asked(NamedTuple):
    """How an agent asked for a turn."""

    parent: int | None
    """The turn whose answer the conversation continues."""
    reason: str
    """Why the turn began a branch; empty where it did not, and in the first turn."""
    dialect: str
    model: str
    """As the request named it; the job decides which one answers."""
    num_messages: int
    """In the whole conversation."""
    num_old: int
    """How many of these ``parent`` stands for."""


class Repeated(NamedTuple):
    """How often one turn was asked for again and given again."""

    turn: int
    times: int


# Names that a client chose are cut to it before they are recorded.
MAX_ASKED_CHARS = 128
MAX_USER_CHARS = 256
_Scalar: TypeAlias = (
    EpisodeKey | int | float | str | Outcome | TimeSplit | Asked | tuple[int | TurnReward | Repeated, ...] | None
)


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
    spent: TimeSplit | None = None
    """Where the time went, as far as it was recorded."""
    untrained_turns: tuple[int, ...] = ()
    """Only on the last segment: the turns, in order, that were sampled but are no actions of the episode: the agent
    never received them, or went on from another sample, or that one was paid."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """Only on the last segment: what turns were paid, as far as it was known when the episode ended; in order."""
    repeated: tuple[Repeated, ...] = ()
    """Only on the last segment: the turns that were given more than once, in order."""
    asked: Asked | None = None
    """Only on the first segment of a turn that an agent asked for."""
    user: str = ""
    """Beside ``asked``: in whose name, where the request said so."""
    num_actions: int = field(init=False)
    """How many tokens the policy sampled. With ``logprob_sum`` it checks a segment end to end."""
    logprob_sum: float = field(init=False)
    """Sum of the behaviour log-probs in float64."""
    encoded: bytes | None = field(default=None, init=False, repr=False, compare=False)
    """The bytes that it was read from, where it was."""

    def __post_init__(self) -> None:
        for name in ("attempt", "branch", "index", "turn", "version"):
            check_count(name, getattr(self, name))
        if type(self.engine_id) is not str:
            raise InvalidValue(f"engine_id is a string, not {self.engine_id!r}")
        vars(self).update(
            temperature=plain_number("temperature", self.temperature),
            token_ids=frozen_array(self.token_ids, "int32", "token_ids"),
            action_mask=frozen_array(self.action_mask, "bool", "action_mask"),
            behavior_logprobs=frozen_array(self.behavior_logprobs, "float32", "behavior_logprobs"),
            cache_mode=member(CacheMode, self.cache_mode),
            turn_reward=None if self.turn_reward is None else plain_number("turn_reward", self.turn_reward),
            spent=None if self.spent is None else TimeSplit(*(plain_number("spent", second) for second in self.spent)),
            untrained_turns=tuple(self.untrained_turns),
            turn_rewards=tuple(
                TurnReward(turn, plain_number("turn_rewards", paid)) for turn, paid in self.turn_rewards
            ),
            repeated=tuple(Repeated(*one) for one in self.repeated),
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
        if self.untrained_turns or self.turn_rewards or self.repeated:
            self._check_named_turns()
        if self.asked is not None:
            self._check_asked(self.asked)
        if len(self.user) > MAX_USER_CHARS or (self.user and self.asked is None):
            raise InvalidValue(f"a turn is asked for in a name of at most {MAX_USER_CHARS} characters")
        num_tokens = len(self.token_ids)
        if not num_tokens == len(self.action_mask) == len(self.behavior_logprobs):
            raise InvalidValue(
                f"{num_tokens} tokens, {len(self.action_mask)} mask entries, {len(self.behavior_logprobs)} log-probs"
            )
        if not num_tokens and self.outcome is None:
            raise InvalidValue("a segment without tokens must carry the outcome")
        num_actions, logprob_sum = checked_sums(self.token_ids, self.action_mask, self.behavior_logprobs)
        fields = vars(self)
        fields["num_actions"] = num_actions
        fields["logprob_sum"] = logprob_sum

    def _check_named_turns(self) -> None:
        self._check_turns("untrained turns", self.untrained_turns)
        self._check_turns("turn rewards", [one.turn for one in self.turn_rewards])
        for one in self.turn_rewards:
            finite("a turn reward", one.reward)
        self._check_turns("repeated turns", [one.turn for one in self.repeated])
        if any(one.times < 1 for one in self.repeated):
            raise InvalidValue("a repeated turn was given again at least once")

    def _check_turns(self, name: str, turns: Sequence[int]) -> None:
        if turns and self.outcome is None:
            raise InvalidValue(f"only the last segment names {name}")
        for turn in turns:
            check_count(f"a turn of {name}", turn)
        if list(turns) != sorted(set(turns)):
            raise InvalidValue(f"{name} are named once and in order, not {tuple(turns)}")

    def _check_asked(self, asked: Asked) -> None:
        if asked.parent is not None:
            check_count("the parent of a turn", asked.parent, self.turn - 1)
        check_count("the messages of a request", asked.num_messages)
        check_count("the old messages of a request", asked.num_old, asked.num_messages)
        if max(len(asked.reason), len(asked.dialect), len(asked.model)) > MAX_ASKED_CHARS:
            raise InvalidValue(f"what is recorded of a request has at most {MAX_ASKED_CHARS} characters")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_final(self) -> bool:
        return self.outcome is not None

    def _scalars(self) -> tuple[_Scalar, ...]:
        return (
            *(self.key, self.attempt, self.branch, self.index, self.turn, self.version),
            *(self.temperature, self.engine_id, self.cache_mode, self.turn_reward, self.outcome, self.spent),
            *(self.untrained_turns, self.turn_rewards, self.repeated, self.asked, self.user),
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
    """Their sampled tokens are context only, not actions."""

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
        """0 where nothing was read: an agent may end without asking."""
        return 1 + max((segment.turn for segment in self.segments if segment.num_tokens), default=-1)

    @property
    def turn_rewards(self) -> list[float | None]:
        """One for each turn; None for a turn that was paid nothing."""
        rewards: list[float | None] = [None] * self.num_turns
        early = (TurnReward(s.turn, s.turn_reward) for s in self.segments if s.turn_reward is not None)
        for turn, reward in (*early, *self.segments[-1].turn_rewards):
            if turn < len(rewards):  # of others nothing was sampled
                rewards[turn] = (rewards[turn] or 0.0) + reward
        return rewards

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
