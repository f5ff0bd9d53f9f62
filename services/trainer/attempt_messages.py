"""What the worker and the process of an attempt say to each other: one JSON object per line.

The worker says ``Begin`` once, then possibly ``Leave`` and ``Stop``. The attempt says ``Ready`` when it can begin,
``Alive`` while its event loop turns, and ``AttemptEnd`` as its last word. Nothing here knows about pipes or processes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from services.state.jobs import Claim, StatusReason

Capabilities: TypeAlias = dict[str, str | int]
"""What people want to know about a trainer before they give it a job."""

How: TypeAlias = Literal["succeeded", "cancelled", "released", "attempt_failed", "failed", "claim_lost"]
"""``succeeded``, ``cancelled`` and ``failed`` end the job. ``attempt_failed`` counts, ``released`` does not; either way
another attempt goes on with the job. After ``claim_lost`` there is nothing left to say to Redis."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Run an attempt at this job."""

    claim: Claim


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Hand the job over at the next step boundary, saved."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End where you are."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Everything slow is imported."""

    capabilities: Capabilities


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The event loop turns."""


class AttemptEnd(msgspec.Struct, frozen=True, tag="end"):
    """How the attempt ended; ``code`` and ``message`` are the reason its job is given."""

    how: How
    code: str = ""
    message: str = ""

    @classmethod
    def because(cls, how: How, reason: StatusReason | None) -> AttemptEnd:
        return cls(how) if reason is None else cls(how, reason.code, reason.message)

    @property
    def reason(self) -> StatusReason | None:
        return StatusReason(self.code, self.message) if self.code else None


Order: TypeAlias = Begin | Leave | Stop
Answer: TypeAlias = Ready | Alive | AttemptEnd
_order: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_order(line: bytes) -> Order:
    return _order.decode(line)


def decode_answer(line: bytes) -> Answer:
    return _answer.decode(line)
