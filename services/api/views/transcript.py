"""An episode as a person reads it: turns, messages, tool calls, and the text of every token.

One rule: everything is read from the recorded token ids, so what is shown is what was sampled and trained, not what
somebody meant to send. It is pure; whoever calls it brings the segments and the codec of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo_core.chat import ChatCodec, Tokenizer, ToolSchema
from gspo_core.types import Segment, Spent

# A character of several bytes may be cut into as many tokens, with a little room for merged beginnings.
MAX_TOKENS_OF_A_CHARACTER = 6
MAX_SHOWN_DEPTH = 16
MAX_EXACT = 2**53
MAX_LOG_RATIO = 20.0
DAMAGED = "\N{REPLACEMENT CHARACTER}"


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


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; a character that several tokens make up stands at the last of them."""
    texts: list[str] = []
    begin = 0
    for position in range(len(ids)):
        text = tokenizer.decode(ids[begin : position + 1])
        is_cut = text.endswith(DAMAGED) and position - begin + 1 < MAX_TOKENS_OF_A_CHARACTER
        texts.append("" if is_cut and position + 1 < len(ids) else text)
        if texts[-1]:
            begin = position + 1
    return texts


def tokens_view(
    segments: Sequence[Segment], tokenizer: Tokenizer | None, trained: NDArray[np.float32] | None = None
) -> dict[str, list[Any]]:
    """One entry per token in each column, in the order of the segments. ``trained``: log-probs of the sampled ones."""
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
    """How much more probable a token was when it was trained than when it was sampled; None where that is not known."""
    if trained is None or len(trained) != sum(segment.num_actions for segment in segments):
        return [None for segment in segments for _ in range(segment.num_tokens)]
    logprobs = iter(trained.tolist())
    found: list[float | None] = []
    for segment in segments:
        for is_sampled, sampled in zip(segment.action_mask.tolist(), segment.behavior_logprobs.tolist(), strict=True):
            difference = next(logprobs) - sampled if is_sampled else math.nan
            found.append(round(math.exp(min(difference, MAX_LOG_RATIO)), 6) if math.isfinite(difference) else None)
    return found


def turns_view(
    segments: Sequence[Segment], codec: ChatCodec | None, tools: Sequence[ToolSchema] | None
) -> list[dict[str, Any]]:
    """One entry per turn: the messages that led to it, what was sampled, and where its tokens stand."""
    turns: list[dict[str, Any]] = []
    begin = 0
    for (branch, turn), group in groupby(segments, key=lambda one: (one.branch, one.turn)):
        pieces = list(group)
        end = begin + sum(piece.num_tokens for piece in pieces)
        ids, sampled = _split(pieces)
        rewards = [piece.turn_reward for piece in pieces if piece.turn_reward is not None]
        acting = [piece for piece in pieces if piece.num_actions]
        entry = {
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
        turns.append(entry | _said(ids, sampled, codec, tools))
        begin = end
    return turns


def spent_view(pieces: Sequence[Segment]) -> dict[str, float] | None:
    """Seconds by where they went; None where nobody recorded any."""
    known = [piece.spent for piece in pieces if piece.spent is not None]
    if not known:
        return None
    return {name: round(sum(getattr(one, name) for one in known), 3) for name in Spent._fields}


def _split(pieces: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """Ids that the environment or the template wrote, and ids that the policy sampled."""
    given: list[int] = []
    sampled: list[int] = []
    for piece in pieces:
        for token, is_action in zip(piece.token_ids.tolist(), piece.action_mask.tolist(), strict=True):
            (sampled if is_action else given).append(token)
    return given, sampled


def _said(
    given: Sequence[int], sampled: Sequence[int], codec: ChatCodec | None, tools: Sequence[ToolSchema] | None
) -> dict[str, Any]:
    if codec is None:
        return {"messages": [], "text": None, "reasoning": None, "complete": None, "calls": []}
    parsed = codec.parse(sampled, tools)
    calls = [
        {
            "name": _sound(call.name),
            "arguments": _sound(call.arguments),
            "status": str(call.status),
            "raw": _sound(call.raw),
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


def _sound(value: Any, depth: int = 0) -> Any:
    """What a policy wrote as something that JSON can carry: it may write NaN, half a character, or a tower of lists."""
    if depth > MAX_SHOWN_DEPTH:
        return "…"
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_sound(name): _sound(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_sound(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Browsers read numbers as doubles; a longer one would be shown as another.
    return str(value) if type(value) is int and abs(value) > MAX_EXACT else value


def _messages(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[dict[str, str]]:
    """The messages in a piece of a prompt. Control tokens are told by their ids, so no text can pose as one."""
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


def _with_results(role: str, text: str) -> Iterator[dict[str, str]]:
    """Some formats write what tools return inside a turn of the user."""
    opening, closing = _RESULT
    if role != "user" or not text.startswith(opening):
        yield {"role": role, "text": text}
        return
    for result in text.split(opening)[1:]:
        yield {"role": "tool", "text": result.strip().removesuffix(closing).strip()}
