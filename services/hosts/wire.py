"""What passes between a rollout worker and its environment hosts: frames of JSON, and turns and answers as JSON.

Rule: nothing but JSON crosses, never code or pickled objects, and no frame is longer than ``MAX_FRAME_BYTES``.
Only the standard library and `gspo_core.env` are imported: hosts run under interpreters that have nothing else of ours.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from gspo_core.env import CallStatus, Message, Observation, ParsedTurn, Start, ToolCall, ToolSchema
from gspo_core.types import Split, StopReason

MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")


class BadFrame(Exception):
    """The peer does not keep to the protocol; the connection is of no use any more."""


class FrameTooLong(ValueError):
    """What should be sent is longer than a frame may be."""


def encode(frame: Mapping[str, Any]) -> bytes:
    """Raises ``TypeError`` or ``ValueError`` where something in it is not JSON, ``FrameTooLong`` if it is too much."""
    # A lone surrogate is no text: tokenizers and decoders refuse it, so it becomes a question mark here.
    body = json.dumps(frame, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLong(f"{len(body)} bytes; a frame has at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of its frames."""

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


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bounds of a host and of each of its processes. An author sets them as ``hosting``, a job overrides them."""

    sessions_per_process: int | None = None
    """None: as many as the class allows (see `services.hosts.inside.traits`)."""
    max_processes: int = 64
    memory_mb: int = 1024
    file_mb: int = 64

    def __post_init__(self) -> None:
        for name in ("sessions_per_process", "max_processes", "memory_mb", "file_mb"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"hosting: {name} is positive, not {value}")


def turn_to_json(turn: ParsedTurn) -> dict[str, Any]:
    return {
        "text": turn.text,
        "calls": [[call.name, call.arguments, str(call.status), call.raw, call.start, call.end] for call in turn.calls],
        "complete": turn.complete,
        "reasoning": turn.reasoning,
    }


def turn_from_json(given: Mapping[str, Any]) -> ParsedTurn:
    calls = tuple(
        ToolCall(name, arguments, CallStatus(status), raw, start, end)
        for name, arguments, status, raw, start, end in given["calls"]
    )
    return ParsedTurn(given["text"], calls, given["complete"], given["reasoning"])


def start_to_json(start: Start) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in start.messages],
        "tools": [dict(schema) for schema in start.tools],
    }


def start_from_json(given: Any) -> Start:
    messages, tools = cast(list[Message], _dicts(given, "messages")), cast(list[ToolSchema], _dicts(given, "tools"))
    return Start(messages, tools)


def observation_to_json(observation: Observation) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in observation.messages],
        "stop": str(observation.stop_reason) if observation.stop_reason else None,
        "reward": observation.reward,
    }


def observation_from_json(given: Any) -> Observation:
    messages = cast(list[Message], _dicts(given, "messages"))
    stop, reward = given.get("stop"), given.get("reward")
    try:
        reason = StopReason(stop) if stop is not None else None
        return Observation(messages, reason is not None, reason, None if reward is None else float(reward))
    except (TypeError, ValueError) as error:
        raise BadFrame(f"no observation: {error}") from None


def score_from_json(given: Any) -> tuple[float, dict[str, float]]:
    try:
        reward, parts = given
        return float(reward), {str(name): float(part) for name, part in parts.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise BadFrame(f"no score: {error}") from None


def _dicts(given: Any, name: str) -> list[dict[str, Any]]:
    found = given.get(name) if isinstance(given, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise BadFrame(f"{name} is not a list of objects")
    return found


@dataclass(frozen=True, slots=True)
class HostDescription:
    """What a host says of its environment once it is loaded."""

    describe: dict[str, Any]
    num_tasks: Mapping[Split, int]
    limits: Mapping[str, Any]
    replayable: bool
    has_snapshot: bool
    reward_range: tuple[float, float] | None
    tools: list[dict[str, Any]]
    sessions_per_process: int
    max_processes: int

    @classmethod
    def from_json(cls, given: Any) -> HostDescription:
        try:
            bounds = given["reward_range"]
            return cls(
                describe=dict(given["describe"]),
                num_tasks={split: int(given["num_tasks"][str(split)]) for split in Split},
                limits=dict(given["limits"]),
                replayable=bool(given["replayable"]),
                has_snapshot=bool(given["has_snapshot"]),
                reward_range=(float(bounds[0]), float(bounds[1])) if bounds is not None else None,
                tools=_dicts(given, "tools"),
                sessions_per_process=int(given["sessions_per_process"]),
                max_processes=int(given["max_processes"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadFrame(f"no description of an environment: {type(error).__name__}: {error}") from None
