"""Redis records of engines, trainers and rollout workers: frozen, written and read by ``fleet``.

Rule: unknown fields are ignored and missing fields have defaults, so releases can run side by side. A record that
cannot be read at all raises ``UnreadableRecord``; ``fleet`` reports and skips it. It does not decide which process is
alive or which engine to use.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar, get_args

import msgspec

R = TypeVar("R", bound="msgspec.Struct")
# An agent may well answer a task by itself.
MIN_UNHEARD = 4
WorkerKind: TypeAlias = Literal["rollout", "gateway"]
"""What drives the episodes that it holds: an environment, or an agent."""
WORKER_KINDS: tuple[WorkerKind, ...] = get_args(WorkerKind)


class UnreadableRecord(ValueError):
    """The text in Redis is not a record of the expected kind."""


class EngineState(StrEnum):
    """An engine's state according to the trainer that holds it. An unheld engine has no state.

    ``JOINING -> PAUSING -> LOADING -> RESUMING -> READY`` is an engine's path to new weights (``switch`` in
    `services.trainer.fleet.engine_switch`); the trainer's pool publishes SWITCHING and DRAINING to other processes.
    """

    JOINING = "joining"
    """Just bound, without weights of the job yet. Set when the pool binds it."""
    PAUSING = "pausing"
    """Asked to pause for new weights. Set by the switch."""
    LOADING = "loading"
    """Paused while new weights load. Set by the switch."""
    RESUMING = "resuming"
    """Holds the new weights and was asked to resume. Set by the switch."""
    READY = "ready"
    """Samples under its label. Set by the switch once the label is verified."""
    DIRTY = "dirty"
    """May hold any weights; paused or about to be reloaded. Set by the switch, the watch and the parity gate."""
    GONE = "gone"
    """Not reachable; about to be given back. Set by the switch and the watch."""
    SWITCHING = "switching"
    """Between two versions; its requests wait. Published by the pool in place of the four states of a switch."""
    DRAINING = "draining"
    """Gets nothing new and goes back once idle. Published by the pool for an engine asked to drain."""

    @property
    def may_be_asked(self) -> bool:
        """Whether it accepts requests; during a pause they wait."""
        return self not in (EngineState.JOINING, EngineState.DIRTY, EngineState.GONE)


class EngineReport(msgspec.Struct, frozen=True):
    """A trainer's report on an engine it holds, with the cost of its switches."""

    state: EngineState
    label: str = ""
    """Label of the weights it certainly holds; empty while unknown."""
    reason: str = ""
    """Why it is not ready."""
    num_switches: int = 0
    paused_s: float = 0.0
    last_paused_s: float = 0.0
    tokens_prefilled_again: int = 0
    tokens_lost: int = 0
    context_tokens: int = 0
    """The longest sequence that it samples; 0 where it does not say, or its trainer is of an older release."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises UnreadableRecord."""
        return _read(cls, text)


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process that registers repeatedly while it lives."""

    id: str
    beats: int = 0
    """Number of registrations, counted by the server."""

    read_elsewhere: ClassVar[tuple[str, ...]] = ("beats",)
    """Fields that Redis keeps beside the record and that are not written with it."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"the record of a process needs a string under 'id', not {self.id!r}")

    def to_json(self) -> bytes:
        """The form stored in Redis."""
        fields = msgspec.structs.asdict(self)
        return msgspec.json.encode({name: value for name, value in fields.items() if name not in self.read_elsewhere})

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises UnreadableRecord."""
        return _read(cls, text)


class TrainerRecord(ProcessRecord, frozen=True, kw_only=True):
    """A trainer and its process's capabilities."""

    kind: str = "trainer"
    host: str = ""
    pid: int = 0
    device: str = ""
    num_gpus: int = 0
    threads: int = 0
    torch: str = ""
    num_ranks: int = 1


class WorkerRecord(ProcessRecord, frozen=True, kw_only=True):
    """A process that holds episodes, and its current work."""

    kind: str = "rollout"
    """A ``WorkerKind``."""
    host: str = ""
    address: str = ""
    """The base URL at which other gateways reach this one."""
    pid: int = 0
    draining: bool = False
    """It takes no more episodes and exits when it holds none."""
    jobs: tuple[str, ...] = ()
    num_episodes: int = 0
    max_episodes: int = 0
    environment_capacity: dict[str, int] = {}
    """Job -> number of episodes its environment can run at once."""
    engine_requests: dict[str, int] = {}
    """By engine address."""
    ill_environments: dict[str, dict[str, str]] = {}
    """Job -> quarantined environments, each with its last error."""
    counters: dict[str, int | float] = {}

    @property
    def open_requests(self) -> int:
        """Requests of agents that wait for an answer, or are reading one."""
        begun, ended = ("turns/asked", "turns/repeated"), ("answers/delivered", "answers/undelivered")
        return int(
            sum(self.counters.get(name, 0) for name in begun) - sum(self.counters.get(name, 0) for name in ended)
        )

    @property
    def hears_no_agent(self) -> bool:
        """Its agents come to their end, and none has ever asked it for a turn."""
        ended_unheard = self.counters.get("agents/asked_nothing", 0)
        return not self.counters.get("turns/asked") and ended_unheard >= MIN_UNHEARD


class DescribedEngine(Protocol):
    """An engine's description of itself."""

    @property
    def label(self) -> str: ...

    @property
    def model_path(self) -> str | None: ...

    @property
    def model_type(self) -> str | None: ...

    @property
    def architectures(self) -> tuple[str, ...] | None: ...


class EngineRecord(ProcessRecord, frozen=True, kw_only=True):
    """An engine: its last description, the job that holds it, and that job's trainer's report."""

    url: str = ""
    model_path: str | None = None
    weight_version: str | None = None
    """Its own name for its weights at that time."""
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None
    job: str | None = None
    """The job it is bound to."""
    draining: bool = False
    """Asked to drain: it gets no new requests and no new weights."""
    report: EngineReport | None = None
    """Present only while bound."""

    read_elsewhere: ClassVar[tuple[str, ...]] = ("beats", "job", "draining", "report")

    @classmethod
    def of(cls, url: str, said: DescribedEngine) -> EngineRecord:
        """Names an engine by its address. Keys and other paths of its server stay out."""
        return cls(
            id=url,
            url=url,
            model_path=said.model_path,
            weight_version=said.label or None,
            model_type=said.model_type,
            architectures=said.architectures,
        )

    @property
    def state(self) -> EngineState | None:
        return self.report.state if self.report else None

    @property
    def label(self) -> str:
        """Label of the weights its trainer knows it to hold; empty while unknown."""
        return self.report.label if self.report else ""


def _read(kind: type[R], text: bytes) -> R:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise UnreadableRecord(f"{error}: {text[:200]!r}") from error
