"""What Redis holds of engines, trainers and rollout workers: one frozen record each, written and read by ``fleet``.

Rule: fields that a record does not know are ignored and fields that it lacks have defaults, so that releases can run
side by side. A record that cannot be read at all raises ``UnreadableRecord``; ``fleet`` reports and skips it.
Which process is alive, and which engine to ask, is decided elsewhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, Protocol, Self, TypeVar

import msgspec

R = TypeVar("R", bound="msgspec.Struct")


class UnreadableRecord(ValueError):
    """The text in Redis is not a record of the expected kind."""


class EngineState(StrEnum):
    """What the trainer that holds an engine says of it. An engine that no trainer holds has no state.

    ``JOINING -> PAUSING -> LOADING -> RESUMING -> READY`` is the way of one engine to new weights (``switch`` in
    `trainer.engine_switch`); SWITCHING and DRAINING are how the trainer's pool tells other processes of it.
    """

    JOINING = "joining"
    """Bound a moment ago, holds no weights of the job yet. Set when the pool binds it."""
    PAUSING = "pausing"
    """Asked to pause for new weights. Set by the switch."""
    LOADING = "loading"
    """Paused, new weights are on their way in. Set by the switch."""
    RESUMING = "resuming"
    """Holds the new weights, asked to go on. Set by the switch."""
    READY = "ready"
    """Samples under its label. Set by the switch when the label is verified."""
    DIRTY = "dirty"
    """May hold any weights; paused or about to be loaded anew. Set by the switch, the watch and the parity gate."""
    GONE = "gone"
    """No connection; about to be given back. Set by the switch and the watch."""
    SWITCHING = "switching"
    """Between two versions: requests on it wait. Told by the pool instead of the four states of a switch."""
    DRAINING = "draining"
    """Gets nothing new and is given back once nothing runs on it. Told by the pool of an engine asked to drain."""

    @property
    def may_be_asked(self) -> bool:
        """Whether requests may be sent there; in a pause they wait."""
        return self not in (EngineState.JOINING, EngineState.DIRTY, EngineState.GONE)


class EngineReport(msgspec.Struct, frozen=True):
    """What the trainer that holds an engine says of it, and what its switches have cost."""

    state: EngineState
    label: str = ""
    """Of the weights that it holds for certain; empty while that is unknown."""
    reason: str = ""
    """Why it is not ready."""
    num_switches: int = 0
    paused_s: float = 0.0
    last_paused_s: float = 0.0
    tokens_prefilled_again: int = 0
    tokens_lost: int = 0

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises UnreadableRecord."""
        return _read(cls, text)


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One that registers, again and again for as long as it lives."""

    id: str
    beats: int = 0
    """How often it has registered. Counted by the server."""

    read_elsewhere: ClassVar[tuple[str, ...]] = ("beats",)
    """Fields that Redis keeps beside the record; they are not written with it."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"the record of a process has a text under 'id', not {self.id!r}")

    def to_json(self) -> bytes:
        """As Redis holds it."""
        fields = msgspec.structs.asdict(self)
        return msgspec.json.encode({name: value for name, value in fields.items() if name not in self.read_elsewhere})

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Raises UnreadableRecord."""
        return _read(cls, text)


class TrainerRecord(ProcessRecord, frozen=True, kw_only=True):
    """A trainer, and what its process can do."""

    kind: str = "trainer"
    host: str = ""
    pid: int = 0
    device: str = ""
    num_gpus: int = 0
    threads: int = 0
    torch: str = ""
    num_ranks: int = 1


class WorkerRecord(ProcessRecord, frozen=True, kw_only=True):
    """A rollout worker, and what it is doing."""

    kind: str = "rollout"
    host: str = ""
    pid: int = 0
    draining: bool = False
    """It takes no more episodes and ends when it holds none."""
    jobs: tuple[str, ...] = ()
    num_episodes: int = 0
    max_episodes: int = 0
    environment_capacity: dict[str, int] = {}
    """By job: episodes that find a place in their environment at once."""
    engine_requests: dict[str, int] = {}
    """By address of the engine."""
    ill_environments: dict[str, dict[str, str]] = {}
    """By job: environments in quarantine, with the last error."""
    counters: dict[str, int | float] = {}


class Described(Protocol):
    """What an engine says of itself."""

    @property
    def label(self) -> str: ...

    @property
    def model_path(self) -> str | None: ...

    @property
    def model_type(self) -> str | None: ...

    @property
    def architectures(self) -> tuple[str, ...] | None: ...


class EngineRecord(ProcessRecord, frozen=True, kw_only=True):
    """An engine: what it said when it was last seen, which job holds it, and what that job's trainer says of it."""

    url: str = ""
    model_path: str | None = None
    weight_version: str | None = None
    """What it called its weights then."""
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None
    job: str | None = None
    """The job that it is bound to."""
    draining: bool = False
    """It was asked to be left alone: it gets no new requests and no new weights."""
    report: EngineReport | None = None
    """Only while it is bound."""

    read_elsewhere: ClassVar[tuple[str, ...]] = ("beats", "job", "draining", "report")

    @classmethod
    def of(cls, url: str, said: Described) -> EngineRecord:
        """An engine is named by its address. Keys and other paths of its server stay out."""
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
        """Of the weights that its trainer knows it to hold; empty while that is unknown."""
        return self.report.label if self.report else ""


def _read(kind: type[R], text: bytes) -> R:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise UnreadableRecord(f"{error}: {text[:200]!r}") from error
