"""Messages between the worker and an attempt process: one JSON object per line.

The worker sends ``Begin`` once, then optionally ``Leave`` and ``Stop``. The attempt sends ``Ready`` when it can begin,
``Alive`` while its event loop runs, and ``AttemptEnd`` last. This module knows nothing about pipes or processes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from services.state.jobs import Claim, ReasonCode, StatusReason

Capabilities: TypeAlias = dict[str, str | int]
"""The facts about a trainer that users check before giving it a job."""

How: TypeAlias = Literal["succeeded", "cancelled", "released", "yielded", "attempt_failed", "failed", "claim_lost"]
"""``succeeded``, ``cancelled`` and ``failed`` end the job. ``attempt_failed`` counts as an attempt, ``released`` and
``yielded`` (which only the worker says) do not; after these three, another attempt continues the job. After
``claim_lost`` the worker reports nothing to Redis."""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Run an attempt at the claimed job."""

    claim: Claim


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Save and hand the job over at the next step boundary."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End immediately."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The slow imports are done."""

    capabilities: Capabilities


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The event loop is running."""


class AttemptEnd(msgspec.Struct, frozen=True, tag="end"):
    """The outcome of the attempt; ``code`` and ``message`` become the status reason of the job."""

    how: How
    code: ReasonCode | Literal[""] = ""
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
