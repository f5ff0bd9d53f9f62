"""What is kept of the traffic of talk keys, and how long: redacted where the operator has it so, dropped by its age.

Rule: redacted text is other tokens than those that were sampled, so no id and no log-prob is kept beside it, and it
could not be trained. The function sees whole turns. Where it fails nothing is stored, and so nothing is answered. Every
gateway drops what is older than is to be kept, from time to time, whoever recorded it, also where a job is over or its
keys are silent. What it cannot do now it does the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import groupby

import msgspec

from gspo_core.chat import ChatCodec
from gspo_core.types import Segment
from services.process.telemetry import get_logger
from services.state.client import Away, RedisFault
from services.state.refusals import Refused
from services.state.talks import MOST_AT_ONCE, Talks, TrafficRetention

Redactor = Callable[[str], str]
FORGET_EVERY_S = 600.0


class NoRedactor(ValueError):
    """The text says why."""


class RedactedTurn(msgspec.Struct, frozen=True):
    turn: int
    branch: int
    read: str
    said: str
    num_tokens: int
    num_sampled: int
    versions: list[int]
    kind: str = "redacted"


def load_redactor(reference: str) -> Redactor:
    """``module:function`` of the operator. Raises ``NoRedactor``."""
    module, _, name = reference.partition(":")
    try:
        found: object = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise NoRedactor(f"{reference} cannot be loaded: {error}") from error
    if not callable(found):
        raise NoRedactor(f"{reference} is no function")

    def redact(text: str) -> str:
        said = found(text)
        if not isinstance(said, str):
            raise TypeError(f"{reference} returned a {type(said).__name__}, and no text")
        return said

    return redact


async def redacted(segments: Sequence[Segment], codec: ChatCodec, redact: Redactor) -> list[bytes]:
    """One record for each turn."""
    turns = [list(found) for _, found in groupby(segments, key=lambda one: (one.branch, one.turn))]
    return [await asyncio.to_thread(_redacted_turn, found, codec, redact) for found in turns]


def _redacted_turn(segments: Sequence[Segment], codec: ChatCodec, redact: Redactor) -> bytes:
    read, said = list[int](), list[int]()
    for segment in segments:
        said += segment.token_ids[segment.action_mask].tolist()
        read += segment.token_ids[~segment.action_mask].tolist()
    decode = codec.tokenizer.decode
    turn = RedactedTurn(
        turn=segments[0].turn,
        branch=segments[0].branch,
        read=redact(decode(read)),
        said=redact(decode(said)),
        num_tokens=len(read) + len(said),
        num_sampled=len(said),
        versions=sorted({one.version for one in segments}),
    )
    return msgspec.json.encode(turn)


async def forget_for_ever(talks: Talks, keep: TrafficRetention, every_s: float = FORGET_EVERY_S) -> None:
    while True:
        try:
            await forget(talks, keep)
        except (Away, RedisFault) as error:
            get_logger().warning("old traffic is dropped later", error=str(error))
        await asyncio.sleep(every_s)


async def forget(talks: Talks, keep: TrafficRetention) -> int:
    """How many segments are gone. Raises ``Away`` and ``RedisFault``."""
    count = 0
    for job in await talks.jobs():
        try:
            while (dropped := await talks.drop_old(job, keep)) > 0:
                count += dropped
                if dropped < MOST_AT_ONCE:
                    break
        except Refused as error:  # what others have to be forgotten is forgotten all the same
            get_logger().warning("old traffic of a job stays", job=job, error=str(error))
    if count:
        get_logger().info("old traffic dropped", segments=count, days=keep.days)
    return count
