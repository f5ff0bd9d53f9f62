"""The messages that a piece of a prompt holds, read back from its token ids.

Rule: control tokens are recognised by id, so no text can pose as one. A format that is not known here is one text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import TypedDict


class ReadingTokenizer(Protocol):
    """The part of a tokenizer that reading needs."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class ShownMessage(TypedDict):
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class _Marks:
    """How a chat format writes one message: begin, role, separator, text, end."""

    begin: str
    separator: str
    end: str


_FORMATS = (
    _Marks("<|im_start|>", "\n", "<|im_end|>"),
    _Marks("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
_RESULT = ("<tool_response>", "</tool_response>")


def messages_in(ids: Sequence[int], tokenizer: ReadingTokenizer) -> Iterator[ShownMessage]:
    """Whole messages only; what begins one without ending it is left out."""
    if (marks := marks_of(tokenizer, ids)) is not None:
        begin, end, separator = marks
        for piece in _pieces(ids, begin, end):
            role, found, text = tokenizer.decode(piece).partition(separator)
            if found and text.strip():
                yield from _with_results(role.strip(), text.strip())
        return
    text = tokenizer.decode(ids).strip()
    if text:
        yield {"role": "context", "text": text}


def marks_of(tokenizer: ReadingTokenizer, ids: Sequence[int]) -> tuple[int, int, str] | None:
    """The ids that begin and end a message here, and what follows its role."""
    for marks in _FORMATS:
        begin, end = tokenizer.token_id(marks.begin), tokenizer.token_id(marks.end)
        if begin is not None and end is not None and begin in ids:
            return begin, end, marks.separator
    return None


def _pieces(ids: Sequence[int], begin: int, end: int) -> Iterator[Sequence[int]]:
    open_at: int | None = None
    for position, token in enumerate(ids):
        if token == begin:
            open_at = position + 1
        elif token == end and open_at is not None:
            yield ids[open_at:position]
            open_at = None


def _with_results(role: str, text: str) -> Iterator[ShownMessage]:
    """Some formats put tool results inside a user turn."""
    opening, closing = _RESULT
    if role != "user" or not text.startswith(opening):
        yield {"role": role, "text": text}
        return
    for result in text.split(opening)[1:]:
        yield {"role": "tool", "text": result.strip().removesuffix(closing).strip()}
