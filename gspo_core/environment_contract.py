"""All that an episode knows about an environment, wherever it runs: ``Environment`` makes ``Session``s.

Rule: what the policy's own action caused is an observation or a stop reason; whatever else goes wrong raises
``EnvironmentFailed`` and is never a reward. No environment is implemented here. A reported number beyond a bound is
refused by its name, and neither cut nor dropped. An author meets the bound where the number is reported; numbers from a
process that a policy may have reached go through ``check_all`` again. What a name says is not judged: it may carry
whatever the environment can see, up to the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias, runtime_checkable

from gspo_core.invariants import MOST_SIZE
from gspo_core.json_value import JSON
from gspo_core.messages import Message, ParsedTurn, ToolSchema
from gspo_core.types import Evidence, Split, StopReason

if TYPE_CHECKING:
    from gspo_core.environment_records import EnvironmentDescription

# An episode's numbers are kept with it: in Redis, in the log of its step, and on its page.
MOST_NUMBERS = 128
MOST_NAME_CHARS = 128
_SHOWN_CHARS = 40
Phase: TypeAlias = Literal[
    "agent", "boot", "task", "start", "reset", "prompt", "act", "done", "score", "snapshot", "restore", "host",
    "replay", "connection", "engine", "unexpected", "capacity", "images", "judge",
]  # fmt: skip
"""Where an attempt at an episode failed. An environment of another release may name another place."""


class BeyondBounds(ValueError):
    """The message names the number, or begins with the name's beginning where that is what is wrong."""


def check_name(name: str) -> None:
    if not name or len(name) > MOST_NAME_CHARS or not name.isprintable():
        raise BeyondBounds(
            f"{name[:_SHOWN_CHARS]!r} is no name of a number: 1 to {MOST_NAME_CHARS} printable characters, "
            f"not {len(name)}"
        )


def check_size(name: str, value: float) -> None:
    """What is not finite has rules of its own elsewhere."""
    if math.isfinite(value) and abs(value) > MOST_SIZE:
        raise BeyondBounds(f"{name} is {value:g}, beyond {MOST_SIZE:g}")


def check_room(name: str, held: Mapping[str, float]) -> None:
    if name not in held and len(held) >= MOST_NUMBERS:
        raise BeyondBounds(f"{name} would be one more than {MOST_NUMBERS} numbers of an episode")


def check_all(values: Mapping[str, float]) -> None:
    if len(values) > MOST_NUMBERS:
        names = ", ".join(name[:_SHOWN_CHARS] for name in list(values)[:3])
        raise BeyondBounds(f"{len(values)} numbers of an episode ({names}, …), more than {MOST_NUMBERS}")
    for name, value in values.items():
        check_name(name)
        check_size(name, value)


class InvalidEnvironment(Exception):
    """The reference names no usable environment. The text says what to change."""


IMAGES: Final = "images"
"""The phase of a failure that never passes: the environment shows something else than text."""


NO_REWARD: Final = "the agent gave no reward"
"""The reason of a failure that a late reward may still mend."""


class EnvironmentFailed(Exception):
    """A failure that the policy did not cause. The episode gets no reward; ``phase`` says where it happened."""

    def __init__(self, phase: Phase, reason: str) -> None:
        super().__init__(f"{phase}: {reason}")
        self.phase = phase
        self.reason = reason


class AtCapacity(EnvironmentFailed):
    """No room for one more session now; try again later. At most ``most`` fit. It counts as no failure."""

    def __init__(self, most: int) -> None:
        super().__init__("capacity", str(most))
        self.most = most


@dataclass(frozen=True, slots=True)
class Start:
    """How an episode begins."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema]


@dataclass(frozen=True, slots=True)
class Observation:
    """The answer to one assistant turn."""

    messages: Sequence[Message] = ()
    done: bool = False
    stop_reason: StopReason | None = None
    """Set exactly when ``done``."""
    reward: float | None = None
    """A reward of this turn alone, for worlds that pay as they go; ``score`` does not repeat it."""

    def __post_init__(self) -> None:
        if self.done != (self.stop_reason is not None):
            raise ValueError(f"done is {self.done}, but the stop reason is {self.stop_reason}")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each phase of a session may take."""

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 20.0
    """One tool call."""
    score_timeout_s: float = 30.0
    close_timeout_s: float = 10.0


class PhaseLimits(Protocol):
    """Anything that states the four deadlines, e.g. ``Timeouts`` or ``spec.EpisodeLimits``."""

    @property
    def reset_timeout_s(self) -> float: ...
    @property
    def step_timeout_s(self) -> float: ...
    @property
    def score_timeout_s(self) -> float: ...
    @property
    def close_timeout_s(self) -> float: ...


class Session(Protocol):
    """One episode of an environment. ``start`` once, ``act`` after every turn, ``score`` once, ``close`` always."""

    async def start(self, task: Mapping[str, JSON], seed: int) -> Start:
        """Raises ``EnvironmentFailed``; only this phase may be tried again, in a new session."""
        ...

    async def act(self, turn: ParsedTurn) -> Observation:
        """Errors of tools come back as messages. Raises ``EnvironmentFailed`` for what the policy did not cause."""
        ...

    async def score(self) -> tuple[float, dict[str, float]]:
        """The finite reward and its named parts; also after a limit has ended the episode."""
        ...

    async def snapshot(self) -> bytes | None:
        """The state after the last turn, from which ``restore`` goes on; None where the environment offers none."""
        ...

    async def restore(self, task: Mapping[str, JSON], seed: int, state: bytes) -> None:
        """In place of ``start``: the session stands where the one stood that gave ``state``."""
        ...

    async def close(self) -> None:
        """Safe to call on every path and more than once; never raises, a failure only shows in ``close_failure``."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers that the author reported with ``ctx.metric``."""
        ...

    @property
    def close_failure(self) -> str | None: ...

    @property
    def is_stuck(self) -> bool:
        """Something of it still runs although its time is over, and cannot be stopped but with its process."""
        ...


@runtime_checkable
class Witness(Protocol):
    """A session that can tell what its reward was made from."""

    def keep_evidence(self, most_bytes: int) -> None:
        """Before ``score``, which then keeps up to so many bytes."""
        ...

    @property
    def evidence(self) -> Evidence:
        """After ``score``."""
        ...


@dataclass(frozen=True, slots=True)
class Llm:
    """Where an agent asks for its turns. Its model and its sampling are the job's; an agent's own choice of them is
    ignored."""

    base_url: str
    """For the OpenAI dialects; ends in `/v1`."""
    api_key: str = field(repr=False)
    model: str = "policy"
    episode: str = ""
    """Names this attempt at the episode: the same in every repetition of its start."""
    reward_key: str = field(default="", repr=False)
    """Posts the episode's rewards and does nothing else. It is for the process that starts the agent: keep it out of
    the policy's reach."""

    @property
    def anthropic_base_url(self) -> str:
        """Clients of this dialect add the version themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def gemini_base_url(self) -> str:
        """Clients of this dialect add the version themselves."""
        return self.base_url.removesuffix("/v1")


class AgentSession(Session, Protocol):
    """One episode that an agent plays: ``start`` begins it, and it asks elsewhere for its turns. It never ``act``s."""

    def offer(self, llm: Llm) -> None:
        """Before ``start``: where the agent asks for its turns."""
        ...

    async def handed_out(self) -> str:
        """After ``start``: the task as JSON, for an agent that fetches it. Raises ``EnvironmentFailed``."""
        ...

    async def ended(self) -> None:
        """Waits until the agent has ended, however long that takes; ``score`` comes after it, or after nothing.

        Raises ``EnvironmentFailed`` if the agent failed."""
        ...


class Environment(Protocol):
    """A world: its tasks and how to open a session."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> Mapping[str, JSON]:
        """The author's defaults, named as in the job specification; the job overrides them."""
        ...

    @property
    def has_snapshot(self) -> bool:
        """Its sessions give snapshots and can be restored from them."""
        ...

    @property
    def replayable(self) -> bool:
        """The same actions after the same start give the same observations and have no outside effects."""
        ...

    @property
    def reward_range(self) -> tuple[float, float] | None: ...

    @property
    def tools(self) -> Sequence[ToolSchema]: ...

    def num_tasks(self, split: Split) -> int:
        """0 where the environment offers no tasks for this split."""
        ...

    async def task(self, split: Split, index: int) -> Mapping[str, JSON]:
        """Task ``index`` of ``split``, to be given to ``start``; the same for every member of a group."""
        ...

    def session(self, *, limits: PhaseLimits | None = None, episode_id: str = "") -> Session: ...

    def describe(self) -> EnvironmentDescription: ...


def description(environment: Environment, system_prompt: str | None = None) -> EnvironmentDescription:
    return {
        "name": environment.name,
        "num_tasks": {str(split): environment.num_tasks(split) for split in Split},
        "tools": list(environment.tools),
        "system_prompt": system_prompt,
        "limits": dict(environment.limits),
        "replayable": environment.replayable,
        "reward_range": list(environment.reward_range) if environment.reward_range else None,
    }


@dataclass
class Context:
    """Passed to members with a parameter named ``ctx``; one per episode."""

    episode_id: str
    seed: int
    task: Mapping[str, JSON]
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    """The conversation so far: first messages, what the policy said, what it was answered."""
    on_log: Callable[[str, Mapping[str, JSON]], None] | None = None
    deadline_s: float = 0.0
    """Seconds that the phase which is running was given."""
    turn_reward: float | None = None
    """What the turn that is being answered was paid so far."""
    is_in_turn: bool = False

    def reward(self, value: float) -> None:
        """Pay the policy for the turn that is being answered; what a turn is paid adds up, and ``get_reward`` does not
        repeat it."""
        if not self.is_in_turn:
            raise RuntimeError("ctx.reward pays a turn, and none is being answered")
        if not math.isfinite(value):
            raise ValueError(f"a reward is a finite number, not {value}")
        check_size("the reward of a turn", value)
        self.turn_reward = (self.turn_reward or 0.0) + float(value)

    def metric(self, name: str, value: float) -> None:
        """Report a number with the outcome of this episode; the last value of a name counts.

        Raises ``BeyondBounds`` for a name, a number, or a count of them beyond their bounds."""
        number = float(value)
        check_name(name)
        check_size(name, number)
        check_room(name, self.metrics)
        self.metrics[name] = number

    def log(self, text: str, **fields: JSON) -> None:
        if self.on_log is not None:
            self.on_log(text, fields)
