"""The protocol between a rollout worker and its environment hosts: frames of JSON, and turns and answers as JSON.

Rule: only JSON crosses, never code or pickled objects, and no frame is longer than ``MAX_FRAME_BYTES``.
It imports the standard library and `gspo_core` alone: hosts run under interpreters without our dependencies.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast, final

from gspo_core.environment_contract import Observation, Start
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, Message, ParsedTurn, ToolCall, ToolSchema
from gspo_core.types import Split, StopReason

MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_write = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class BadFrame(Exception):
    """The peer broke the protocol; close the connection."""


class FrameTooLong(ValueError):
    """The message does not fit into a frame."""


def encode(frame: Mapping[str, object]) -> bytes:
    """Raises ``TypeError`` or ``ValueError`` if something in it is not JSON, ``FrameTooLong`` if it is too long."""
    # Tokenizers and decoders refuse a lone surrogate, so it becomes a question mark here.
    body = _write(frame).encode("utf-8", "replace")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLong(f"{len(body)} bytes; a frame may have at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


MEMORY_MB = 1024
"""The default for each process of a host."""
# The hard bound lies above the watched one: a process that allocates in small pieces is ended whole, with a reason.
HARD_MEMORY_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bounds of a host and of each of its processes. An author sets them as ``hosting``, a job overrides them."""

    sessions_per_process: int | None = None
    """None: as many as the class allows (see `services.hosts.inside.traits`)."""
    max_processes: int = 64
    memory_mb: int = MEMORY_MB
    file_mb: int = 64

    def __post_init__(self) -> None:
        for name in ("sessions_per_process", "max_processes", "memory_mb", "file_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"hosting: {name} must be positive, not {value}")


class TurnFrame(TypedDict):
    """A ``ParsedTurn``; a call is its name, arguments, status, raw text, start and end."""

    text: str
    calls: list[tuple[str | None, JSON, str, str, int, int]]
    complete: bool
    reasoning: str


class LlmFrame(TypedDict):
    """An ``Llm``."""

    base_url: str
    api_key: str
    model: str
    episode: str
    reward_key: str


class Arguments(TypedDict, total=False):
    """The arguments of a request; which are present depends on the operation."""

    task: Mapping[str, JSON]
    task_at: tuple[str, int]
    """Split and index, in place of ``task``."""
    seed: int
    limits: Sequence[float]
    """For a new session: the fields of ``Timeouts``."""
    episode: str
    turn: TurnFrame
    state: str
    """A snapshot, in base64."""
    llm: LlmFrame
    """For the start of an agent."""
    evidence_bytes: int
    """For a score: how much of what it was made from is kept."""


class Request(Arguments):
    """A request to a session."""

    id: int
    session: int
    op: str


@final
class StartFrame(TypedDict):
    messages: Sequence[Message]
    tools: Sequence[ToolSchema]


@final
class ObservationFrame(TypedDict):
    messages: Sequence[Message]
    stop: str | None
    reward: float | None


class Reply(TypedDict, total=False):
    """The one answer to a request: ``failed`` (phase and reason) or ``result``."""

    id: int
    result: StartFrame | ObservationFrame | tuple[float, dict[str, float]] | str | None
    failed: tuple[str, str]
    hung: bool
    """A member is still running although its time is over."""
    metrics: dict[str, float]
    snapshot: str
    evidence: tuple[dict[str, str], dict[str, str]]
    """What a score was made from, and what was left out of it."""


class Boot(TypedDict):
    """Which environment a host loads, and with what."""

    ref: str
    config: Mapping[str, JSON]
    hosting: Mapping[str, int | str]
    networks: Sequence[str] | None
    agent: Mapping[str, JSON] | None
    """How the agent of it is started; None for an environment that is none."""


class Place(TypedDict):
    """Where a host finds itself."""

    scratch: str
    """The folder for its temporary files, which it makes."""
    is_walled: bool
    """Its processes wall themselves off from each other."""
    may_listen: bool
    door: int | None
    """The descriptor through which it reaches its sandboxes; None where they are its own."""


class Order(Boot, Place):
    """The first frame to a host."""


class ForkCommand(TypedDict, total=False):
    """To a host that has loaded its environment: one of these."""

    fork: int
    kill: int


class ForkEvent(TypedDict, total=False):
    """From a host: ``forked`` with ``pid``, or ``ended`` with ``how`` (memory, signal or exit, and its number)."""

    forked: int
    pid: int
    ended: int
    how: tuple[str, int]


def turn_to_json(turn: ParsedTurn) -> TurnFrame:
    return {
        "text": turn.text,
        "calls": [(call.name, call.arguments, str(call.status), call.raw, call.start, call.end) for call in turn.calls],
        "complete": turn.complete,
        "reasoning": turn.reasoning,
    }


def turn_from_json(given: TurnFrame) -> ParsedTurn:
    calls = tuple(
        ToolCall(name, arguments, CallStatus(status), raw, start, end)
        for name, arguments, status, raw, start, end in given["calls"]
    )
    return ParsedTurn(given["text"], calls, given["complete"], given["reasoning"])


def start_to_json(start: Start) -> StartFrame:
    return {
        "messages": [{**message} for message in start.messages],
        "tools": [{**schema} for schema in start.tools],
    }


def start_from_json(given: JSON) -> Start:
    return Start(_messages(given), cast(list[ToolSchema], _dicts(given, "tools")))


def observation_to_json(observation: Observation) -> ObservationFrame:
    return {
        "messages": [{**message} for message in observation.messages],
        "stop": str(observation.stop_reason) if observation.stop_reason else None,
        "reward": observation.reward,
    }


def observation_from_json(given: JSON) -> Observation:
    fields = given if isinstance(given, dict) else {}
    messages, stop, reward = _messages(given), fields.get("stop"), fields.get("reward")
    try:
        reason = StopReason(str(stop)) if stop is not None else None
        return Observation(messages, reason is not None, reason, None if reward is None else _number(reward))
    except ValueError as error:
        raise BadFrame(f"not an observation: {error}") from None


def score_from_json(given: JSON) -> tuple[float, dict[str, float]]:
    match given:
        case [reward, dict() as parts]:
            return _number(reward), {name: _number(part) for name, part in parts.items()}
    raise BadFrame("not a score: expected a reward and its parts")


def _number(given: JSON) -> float:
    if not isinstance(given, int | float):
        raise BadFrame(f"{given!r:.80} is not a number")
    return float(given)


def _messages(given: JSON) -> list[Message]:
    # Their content is left to the code that renders them.
    return cast(list[Message], _dicts(given, "messages"))


def _dicts(given: JSON, name: str) -> list[dict[str, JSON]]:
    found = given.get(name) if isinstance(given, dict) else None
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(items) < len(found):
        raise BadFrame(f"{name} is not a list of objects")
    return items


@dataclass(frozen=True, slots=True)
class HostDescription:
    """An environment, as the host that loaded it describes it."""

    describe: dict[str, Any]
    num_tasks: Mapping[Split, int]
    limits: Mapping[str, Any]
    replayable: bool
    has_snapshot: bool
    reward_range: tuple[float, float] | None
    tools: list[dict[str, Any]]
    sessions_per_process: int
    max_processes: int
    is_agent: bool = False
    memory_mb: int = MEMORY_MB
    """For each process."""

    def __post_init__(self) -> None:
        if len(self.num_tasks) != len(Split):
            raise ValueError(f"num_tasks of {', '.join(self.num_tasks)} only")
