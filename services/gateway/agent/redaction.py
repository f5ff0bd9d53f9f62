"""What is kept of traffic where the operator has it redacted: texts that went through a function of theirs.

Rule: redacted text is other tokens than those that were sampled, so no id and no log-prob is kept beside it, and it
could not be trained. The function sees whole turns. Where it fails nothing is stored, and so nothing is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import groupby

import msgspec

from gspo_core.chat import ChatCodec
from gspo_core.types import Segment

Redactor = Callable[[str], str]


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
    return [await asyncio.to_thread(_turn, found, codec, redact) for found in turns]


def _turn(segments: Sequence[Segment], codec: ChatCodec, redact: Redactor) -> bytes:
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
