"""An episode as a person reads it: turns, messages, tool calls, and the text of every token.

One rule: everything is read from the recorded token ids, so the viewer shows what was sampled and trained, not what was
meant to be sent. It is pure: the caller brings the segments and the codec of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue
from typing_extensions import TypedDict

from gspo_core.messages import ParsedTurn, ToolSchema
from gspo_core.told_messages import ReadingTokenizer, ShownMessage, marks_of, messages_in
from gspo_core.types import Segment, TimeSplit

# A character of several bytes may be cut into as many tokens, with a little room for merged beginnings.
MAX_TOKENS_OF_A_CHARACTER = 6
MAX_SHOWN_DEPTH = 16
MAX_EXACT = 2**53
MAX_LOG_RATIO = 20.0
DAMAGED = "\N{REPLACEMENT CHARACTER}"


class TranscriptCodec(Protocol):
    """The part of a chat codec that reading needs."""

    @property
    def tokenizer(self) -> ReadingTokenizer: ...

    def parse(self, sampled_ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> ParsedTurn: ...


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


class ShownRequest(TypedDict):
    """How an agent asked for a turn."""

    dialect: str
    model: str
    """As the agent named it; the job decides which one answers."""
    num_messages: int
    num_new_messages: int
    num_repeats: int
    """How often the turn was asked for again and given again; known at the end of the episode."""


class Link(TypedDict):
    parent: int | None
    reason: str | None
    shared_tokens: int
    tokens_read_again: int
    """Where an agent's rewritten conversation began a branch: its prompt without the shared tokens."""
    is_trained: bool
    request: ShownRequest | None


class ShownTurn(_Place, Link, _Said):
    """Where a turn's tokens stand, which turn it continues, the messages that led to it, and the policy's words."""


def token_texts(tokenizer: ReadingTokenizer, ids: Sequence[int]) -> list[str]:
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


def arrivals(segments: Sequence[Segment]) -> dict[int, int]:
    """How many tokens the episode had when each turn's last token had arrived."""
    found, num_tokens = dict[int, int](), 0
    for one in sorted(segments, key=lambda segment: segment.index):
        num_tokens += one.num_tokens
        if one.num_tokens or one.turn not in found:
            found[one.turn] = num_tokens
    return found


def tokens_view(
    segments: Sequence[Segment], tokenizer: ReadingTokenizer | None, trained: NDArray[np.float32] | None = None
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
    from gspo_core.log.branches import links  # few requests show an episode

    turns: list[ShownTurn] = []
    paid, linked = _paid(segments), links(segments)
    begin = 0
    for (branch, turn), group in groupby(segments, key=lambda one: (one.branch, one.turn)):
        pieces = list(group)
        end = begin + sum(piece.num_tokens for piece in pieces)
        if end == begin:
            continue  # the outcome stands alone
        ids, sampled = _split(pieces)
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
            "reward": paid.get(turn),
            "timings": spent_view([piece for piece in pieces if not piece.is_final]),
        }
        link = linked[turn]
        turns.append({**place, **link, **_said(_new(ids, link["shared_tokens"], codec), sampled, codec, tools)})
        begin = end
    return turns


def _paid(segments: Sequence[Segment]) -> dict[int, float]:
    """What turns were paid, as far as it is known."""
    paid: dict[int, float] = {}
    for segment in segments:
        early = [] if segment.turn_reward is None else [(segment.turn, segment.turn_reward)]
        for turn, reward in (*early, *segment.turn_rewards):
            paid[turn] = paid.get(turn, 0.0) + reward
    return paid


def spent_view(pieces: Sequence[Segment]) -> dict[str, float] | None:
    """Seconds by where they went; None where none were recorded."""
    known = [piece.spent for piece in pieces if piece.spent is not None]
    if not known:
        return None
    return {name: round(sum(getattr(one, name) for one in known), 3) for name in TimeSplit._fields}


def _split(pieces: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """The ids from the environment or the template, and the ids that the policy sampled."""
    given: list[int] = []
    sampled: list[int] = []
    for piece in pieces:
        for token, is_action in zip(piece.token_ids.tolist(), piece.action_mask.tolist(), strict=True):
            (sampled if is_action else given).append(token)
    return given, sampled


def _new(given: Sequence[int], num_shared: int, codec: TranscriptCodec | None) -> Sequence[int]:
    """What an earlier branch does not have; a message that differs is shown whole."""
    marks = None if codec is None else marks_of(codec.tokenizer, given)
    if marks is None:
        return given[num_shared:]
    begin, end = marks[:2]
    old = list(given[:num_shared])
    last = max((place for place, token in enumerate(old) if token == begin), default=num_shared)
    return given[num_shared if end in old[last:] else last :]


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
        "messages": list(messages_in(given, codec.tokenizer)),
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
