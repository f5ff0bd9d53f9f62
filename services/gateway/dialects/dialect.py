"""What every dialect does: read a request, and write its answer, whole or as a stream of events, or its error.

Rule: a dialect holds no connection and awaits nothing. A stream that was begun tells exactly what the whole answer
tells, in the order reasoning, text, calls, and what stands behind the calls. With an error it is said outright whether
to send the request again (``x-should-retry``), since clients would otherwise repeat a conflict and an ended episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from gspo_core.json_value import JSON
from gspo_core.messages import ToolCall
from services.episodes.policy import Span
from services.gateway.dialects.tool_forms import Forms
from services.gateway.dialects.turns import Answer, Piece, Refusal, RefusalKind, TurnRequest

# Fields of requests, in any dialect.
HISTORIES = frozenset({"messages", "input", "contents"})
# Two tries of a client that was not set up for it then outlast a restart.
RETRY_AFTER_S = 5
COMMENT = b": waiting\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request as it was read."""

    ask: TurnRequest
    model: str
    """The name that the client used, whatever policy answers."""
    is_stream: bool
    ignored: tuple[str, ...]
    """Fields that the job decides."""
    body: Mapping[str, JSON]
    unsupported: tuple[Refusal, ...] = ()
    """For fields that are refused unless the job only has them named."""
    forms: Forms = field(default_factory=dict)
    """For tools that are no functions to the client."""
    wants_usage: bool = False
    """Where the use of tokens is not told in a stream unless it is asked for."""

    def without_history(self) -> ParsedRequest:
        """For the answer, which tells nothing of it: it is large, and a stream may be open for long."""
        body = {name: value for name, value in self.body.items() if name not in HISTORIES}
        return replace(self, ask=replace(self.ask, messages=(), tools=(), said=()), body=body)


@dataclass(frozen=True, slots=True)
class Heading:
    """What is known of an answer before any of it."""

    id: str
    created_at: int
    model: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of a request before it is written in a dialect: a status, names for programs, words for people."""

    status: int
    code: str
    message: str
    param: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Writer(Protocol):
    """Writes the events of one stream. Called in this order: ``begin``, pieces and signs of life, then one end."""

    def begin(self) -> bytes: ...

    def piece(self, piece: Piece) -> bytes: ...

    def alive(self) -> bytes:
        """Tells clients that the answer is still coming, in the way that resets their timers."""
        ...

    def end(self, answer: Answer) -> bytes: ...

    def fail(self, fault: Fault) -> bytes: ...


class Dialect(Protocol):
    def read(self, body: JSON, headers: Mapping[str, str]) -> ParsedRequest:
        """Raises ``Refusal``."""
        ...

    def whole(self, question: ParsedRequest, model: str, answer: Answer) -> JSON: ...

    def writer(self, question: ParsedRequest, heading: Heading) -> Writer: ...

    def fault(self, fault: Fault) -> tuple[int, JSON]:
        """The status and the body of an error."""
        ...


class StreamState:
    """What a stream has told of an answer so far."""

    def __init__(self) -> None:
        self._text = self._reasoning = self._behind = ""
        self._calls: tuple[tuple[str, ToolCall], ...] = ()

    def add(self, piece: Piece) -> None:
        if (piece.reasoning and (self._text or self._calls)) or (piece.text and self._calls):
            raise AssertionError("reasoning came behind text, or text behind a call")
        self._text += piece.text
        self._reasoning += piece.reasoning
        self._calls += piece.calls
        self._behind += piece.behind

    def rest(self, answer: Answer) -> Piece:
        """What the pieces left out."""
        calls, before, behind = answer.named_calls, answer.before, answer.behind
        is_begun = before.startswith(self._text) and behind.startswith(self._behind)
        is_begun &= answer.reasoning.startswith(self._reasoning)
        if not is_begun or calls[: len(self._calls)] != self._calls:
            raise AssertionError(f"the pieces of turn {answer.id} are not how its answer begins")
        return Piece(
            text=before[len(self._text) :],
            reasoning=answer.reasoning[len(self._reasoning) :],
            calls=calls[len(self._calls) :],
            behind=behind[len(self._behind) :],
        )


def spans(versions: tuple[Span, ...]) -> JSON:
    """The versions of the policy that sampled an answer: a field that no dialect has, and every client keeps."""
    return [{"start": one.start, "end": one.end, "version": one.version} for one in versions]


def event(data: JSON, name: str = "") -> bytes:
    """JSON has no bare line ends, so the data is one line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


_STATUSES: Mapping[RefusalKind, tuple[int, str]] = {
    RefusalKind.INVALID: (400, "invalid_request"),
    RefusalKind.UNKNOWN_KEY: (401, "invalid_api_key"),
    RefusalKind.OVER_BUDGET: (400, "rollout_stopped"),
    RefusalKind.ENDED: (409, "episode_ended"),
    RefusalKind.TOO_LONG: (400, "context_length_exceeded"),
    RefusalKind.TOO_MANY: (429, "too_many_requests"),
    RefusalKind.AWAY: (503, "unavailable"),
}


def fault_of(refusal: Refusal) -> Fault:
    status, code = _STATUSES[refusal.kind]
    headers = {"x-should-retry": "true" if refusal.may_retry else "false"}
    if refusal.may_retry:
        headers["retry-after"] = str(RETRY_AFTER_S)
    return Fault(status, code, refusal.message, refusal.param, headers)


def final(status: int, code: str, message: str) -> Fault:
    """An error of the request itself, which sending it again does not mend."""
    return Fault(status, code, message, headers={"x-should-retry": "false"})
