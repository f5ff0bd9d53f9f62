"""An episode as a person reads it: turns, messages, tool calls, and the text of every token.

One rule: everything is read from the recorded token ids, so the viewer shows what was sampled and trained, not what was
meant to be sent. It is pure: the caller brings the segments and the codec of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue
from typing_extensions import TypedDict

from gspo_core.messages import ParsedTurn, ToolSchema
from gspo_core.types import Segment, Spent

# A character of several bytes may be cut into as many tokens, with a little room for merged beginnings.
MAX_TOKENS_OF_A_CHARACTER = 6
MAX_SHOWN_DEPTH = 16
MAX_EXACT = 2**53
MAX_LOG_RATIO = 20.0
DAMAGED = "\N{REPLACEMENT CHARACTER}"


class TranscriptTokenizer(Protocol):
    """The part of a tokenizer that reading needs."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class TranscriptCodec(Protocol):
    """The part of a chat codec that reading needs."""

    @property
    def tokenizer(self) -> TranscriptTokenizer: ...

    def parse(self, sampled_ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> ParsedTurn: ...


class ShownMessage(TypedDict):
    role: str
    text: str


class ShownCall(TypedDict):
    """An attempt to call a tool."""

    name: str | None
    arguments: JsonValue
    status: str
    raw: str


class TokenColumns(TypedDict):
    """One entry per token in each column; ``text`` is empty where the tokenizer is away."""

    id: list[int]
    text: list[str]
    sampled: list[bool]
    logprob: list[float]
    ratio: list[float | None]
    version: list[int]
    turn: list[int]
    branch: list[int]


class _Place(TypedDict):
    branch: int
    turn: int
    first_token: int
    end_token: int
    num_actions: int
    logprob_mean: float | None
    versions: list[int]
    engines: list[str]
    cache_modes: list[str]
    reward: float | None
    timings: dict[str, float] | None


class _Said(TypedDict):
    messages: list[ShownMessage]
    text: str | None
    reasoning: str | None
    complete: bool | None
    calls: list[ShownCall]


class ShownTurn(_Place, _Said):
    """Where a turn's tokens stand, the messages that led to it, and what the policy said."""


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


def token_texts(tokenizer: TranscriptTokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; a character made of several tokens stands at the last of them."""
    texts: list[str] = []
    begin = 0
    for position in range(len(ids)):
        text = tokenizer.decode(ids[begin : position + 1])
        is_cut = text.endswith(DAMAGED) and position - begin + 1 < MAX_TOKENS_OF_A_CHARACTER
        texts.append("" if is_cut and position + 1 < len(ids) else text)
        if texts[-1]:
            begin = position + 1
    return texts


def by_branch(segments: Sequence[Segment]) -> list[Segment]:
    """In the order of their branches, which may have grown at the same time."""
    order = {number: place for place, number in enumerate(dict.fromkeys(one.branch for one in segments))}
    return sorted(segments, key=lambda one: order[one.branch])


def tokens_view(
    segments: Sequence[Segment], tokenizer: TranscriptTokenizer | None, trained: NDArray[np.float32] | None = None
) -> TokenColumns:
    """The tokens in the order of the segments. ``trained``: log-probs of those that were trained, by branch."""
    ids = [int(token) for segment in segments for token in segment.token_ids]
    return {
        "id": ids,
        "text": [] if tokenizer is None else token_texts(tokenizer, ids),
        "sampled": [bool(one) for segment in segments for one in segment.action_mask],
        "logprob": [round(float(one), 6) for segment in segments for one in segment.behavior_logprobs],
        "ratio": _ratios(segments, trained),
        "version": [segment.version for segment in segments for _ in range(segment.num_tokens)],
        "turn": [segment.turn for segment in segments for _ in range(segment.num_tokens)],
        "branch": [segment.branch for segment in segments for _ in range(segment.num_tokens)],
    }


def _ratios(segments: Sequence[Segment], trained: NDArray[np.float32] | None) -> list[float | None]:
    """How much more probable each token was in training than in sampling; None where unknown."""
    untrained = {turn for segment in segments for turn in segment.untrained_turns}
    acting = [segment for segment in segments if segment.turn not in untrained]
    if trained is None or len(trained) != sum(segment.num_actions for segment in acting):
        return [None for segment in segments for _ in range(segment.num_tokens)]
    logprobs = iter(trained.tolist())
    found: list[float | None] = []
    for segment in segments:
        for is_sampled, sampled in zip(segment.action_mask.tolist(), segment.behavior_logprobs.tolist(), strict=True):
            is_trained = is_sampled and segment.turn not in untrained
            difference = next(logprobs) - sampled if is_trained else math.nan
            found.append(round(math.exp(min(difference, MAX_LOG_RATIO)), 6) if math.isfinite(difference) else None)
    return found


def turns_view(
    segments: Sequence[Segment], codec: TranscriptCodec | None, tools: Sequence[ToolSchema] | None
) -> list[ShownTurn]:
    turns: list[ShownTurn] = []
    begin = 0
    for (branch, turn), group in groupby(segments, key=lambda one: (one.branch, one.turn)):
        pieces = list(group)
        end = begin + sum(piece.num_tokens for piece in pieces)
        ids, sampled = _split(pieces)
        rewards = [piece.turn_reward for piece in pieces if piece.turn_reward is not None]
        acting = [piece for piece in pieces if piece.num_actions]
        place: _Place = {
            "branch": branch,
            "turn": turn,
            "first_token": begin,
            "end_token": end,
            "num_actions": len(sampled),
            "logprob_mean": sum(one.logprob_sum for one in acting) / len(sampled) if sampled else None,
            "versions": sorted({piece.version for piece in acting}),
            "engines": sorted({piece.engine_id for piece in acting}),
            "cache_modes": sorted({str(piece.cache_mode) for piece in acting}),
            "reward": sum(rewards) if rewards else None,
            "timings": spent_view([piece for piece in pieces if not piece.is_final]),
        }
        turns.append({**place, **_said(ids, sampled, codec, tools)})
        begin = end
    return turns


def spent_view(pieces: Sequence[Segment]) -> dict[str, float] | None:
    """Seconds by where they went; None where none were recorded."""
    known = [piece.spent for piece in pieces if piece.spent is not None]
    if not known:
        return None
    return {name: round(sum(getattr(one, name) for one in known), 3) for name in Spent._fields}


def _split(pieces: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """The ids from the environment or the template, and the ids that the policy sampled."""
    given: list[int] = []
    sampled: list[int] = []
    for piece in pieces:
        for token, is_action in zip(piece.token_ids.tolist(), piece.action_mask.tolist(), strict=True):
            (sampled if is_action else given).append(token)
    return given, sampled


def _said(
    given: Sequence[int], sampled: Sequence[int], codec: TranscriptCodec | None, tools: Sequence[ToolSchema] | None
) -> _Said:
    if codec is None:
        return {"messages": [], "text": None, "reasoning": None, "complete": None, "calls": []}
    parsed = codec.parse(sampled, tools)
    calls: list[ShownCall] = [
        {
            "name": None if call.name is None else _sound_text(call.name),
            "arguments": _sound(call.arguments),
            "status": str(call.status),
            "raw": _sound_text(call.raw),
        }
        for call in parsed.calls
    ]
    return {
        "messages": list(_messages(given, codec.tokenizer)),
        "text": parsed.text,
        "reasoning": parsed.reasoning or None,
        "complete": parsed.complete,
        "calls": calls,
    }


def _sound(value: JsonValue, depth: int = 0) -> JsonValue:
    """A policy may write NaN, half a character or a tower of lists: make it a value that JSON can carry."""
    if depth > MAX_SHOWN_DEPTH:
        return "…"
    if isinstance(value, str):
        return _sound_text(value)
    if isinstance(value, dict):
        return {_sound_text(name): _sound(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_sound(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Browsers read numbers as doubles: a longer integer would change.
    return str(value) if type(value) is int and abs(value) > MAX_EXACT else value


def _sound_text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _messages(ids: Sequence[int], tokenizer: TranscriptTokenizer) -> Iterator[ShownMessage]:
    """The messages in a piece of a prompt. Control tokens are recognised by id, so no text can pose as one."""
    for marks in _FORMATS:
        begin, end = tokenizer.token_id(marks.begin), tokenizer.token_id(marks.end)
        if begin is not None and end is not None and begin in ids:
            for piece in _pieces(ids, begin, end):
                role, found, text = tokenizer.decode(piece).partition(marks.separator)
                if found and text.strip():
                    yield from _with_results(role.strip(), text.strip())
            return
    text = tokenizer.decode(ids).strip()
    if text:
        yield {"role": "context", "text": text}


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
