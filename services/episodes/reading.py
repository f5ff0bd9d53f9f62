"""Reads a turn out of the ids that the policy sampled: what an agent is given, and where it ends without a stop token.

Rule: text is read from ids, never the other way round. What cannot be read as a call stays in the text as it was
sampled, and so do words between calls and behind them: nothing that the policy wrote is hidden from the agent.

A turn ends with the first token behind which its text holds a stop text, or behind its first call. The tokens of the
stop text were sampled, so they are actions of the turn, and so is the whole last one where it says more than the stop
text. What an engine sampled behind that token is no part of the turn. An agent is told what stands before the stop
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from gspo_core.chat import ChatCodec
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall, ToolSchema
from services.episodes.policy import Sampled

# A character whose bytes are not all there yet.
DAMAGED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Reading:
    """One turn as an agent sees it."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    parsed: ParsedTurn
    num_behind: int = 0
    """As an answer has it."""


def read(
    codec: ChatCodec,
    sampled: Sequence[int],
    tools: Sequence[ToolSchema],
    overlap: str = "",
    *,
    gives_calls: bool = True,
    gives_one_call: bool = False,
) -> Reading:
    """``overlap``: as a turn's entry has it. Without ``gives_calls`` all calls are text, with ``gives_one_call`` all
    behind the first are."""
    parsed = codec.parse(sampled, tools)
    calls = tuple(call for call in parsed.calls if is_readable(call) and gives_calls)
    calls = calls[:1] if gives_one_call else calls
    before, behind = _texts(codec, sampled, parsed, calls)
    text = _joined([before, behind])
    hidden = overlap.rstrip()
    if hidden and text.endswith(hidden):
        text = text.removesuffix(hidden).rstrip()
    return Reading(text, parsed.reasoning, calls, parsed, max(len(text) - len(before), 0) if calls else 0)


def _texts(codec: ChatCodec, sampled: Sequence[int], parsed: ParsedTurn, given: Sequence[ToolCall]) -> tuple[str, str]:
    """The text before the first call that is given, and behind it, with what stands there and is none."""
    before, behind = [parsed.text], list[str]()
    if not parsed.calls:
        return parsed.text, ""
    decode, texts = codec.tokenizer.decode, before
    end = parsed.calls[0].start
    for call in parsed.calls:
        texts.append(decode(sampled[end : call.start]))
        if call in given:
            texts = behind
        else:
            texts.append(decode(sampled[call.start : call.end]))
        end = call.end
    stop = next((place for place in range(end, len(sampled)) if sampled[place] in codec.stop_ids), len(sampled))
    texts.append(decode(sampled[end:stop]))
    return _joined(before), _joined(behind)


def _joined(texts: Sequence[str]) -> str:
    return "\n".join(filter(None, map(str.strip, texts)))


def is_readable(call: ToolCall) -> bool:
    """What was never offered is no call that an agent could answer: many an agent's program ends at it."""
    return call.status is CallStatus.OK and isinstance(call.arguments, dict) and _can_be_sent(call.arguments)


def _can_be_sent(arguments: JSON) -> bool:
    """Half of a character cannot, which JSON can spell."""
    try:
        msgspec.json.encode(arguments)
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def certain(codec: ChatCodec, ids: Sequence[int], tools: Sequence[ToolSchema], *, gives_calls: bool = True) -> Reading:
    """What will not change, whatever is sampled next: a call, and all that stands before it, once it is whole."""
    parsed = codec.parse(ids, tools)
    calls = tuple(call for call in parsed.calls if call.is_final and is_readable(call) and gives_calls)
    if calls:
        return Reading(_texts(codec, ids, parsed, calls)[0], parsed.reasoning, calls, parsed)
    may_be_call = not parsed.calls and parsed.text.startswith("{")
    text = "" if may_be_call else parsed.text
    reasoning = parsed.reasoning if parsed.text else parsed.reasoning.rstrip(DAMAGED).rstrip()
    return Reading(text.rstrip(DAMAGED).rstrip(), reasoning, (), parsed)


def stop_text_end(codec: ChatCodec, ids: Sequence[int], stops: Sequence[str], first: int = 0) -> tuple[int, str] | None:
    """How many of ``ids`` are a turn's that a stop text ends, and which text; the first ``first`` hold none of them."""
    decode = codec.tokenizer.decode
    if not stops or not _has(decode(ids), stops):
        return None
    low, high = first, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _has(decode(ids[:middle]), stops) else (middle, high)
    text = decode(ids[:high])
    return high, min((place, stop) for stop in stops if stop and (place := text.find(stop)) >= 0)[1]


def _has(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops if stop)


def before_stop_text(codec: ChatCodec, sampled: Sequence[int], stop_text: str) -> Sequence[int]:
    """Ids to read what an agent is told of: no more than stands before the stop text that ended the turn.

    A token that holds both is read as far as it is told; what is stored is ``sampled``.
    """
    text = codec.tokenizer.decode(sampled) if stop_text else ""
    place = text.find(stop_text) if stop_text else -1
    return sampled if place < 0 else _saying(codec, sampled, text, place)


def certain_ids(codec: ChatCodec, sampled: Sequence[int], stops: Sequence[str]) -> Sequence[int]:
    """Those of ``sampled`` that stand before any stop text that further ones may end."""
    num_held = max((len(stop) - 1 for stop in stops), default=0)
    if not num_held:
        return sampled
    return sampled[: _num_within(codec, sampled, len(codec.tokenizer.decode(sampled)) - num_held)]


def _saying(codec: ChatCodec, ids: Sequence[int], text: str, num_chars: int) -> Sequence[int]:
    """Ids that say the first ``num_chars`` characters of ``text``, which ``ids`` say."""
    decode = codec.tokenizer.decode
    length = _num_within(codec, ids, num_chars)
    while not text.startswith(whole := decode(ids[:length])):
        length -= 1  # it ends within a character
    rest = text[len(whole) : num_chars]
    return [*ids[:length], *codec.tokenizer.encode(rest)] if rest else ids[:length]


def _num_within(codec: ChatCodec, ids: Sequence[int], num_chars: int) -> int:
    """How many ids say no more than the first ``num_chars`` characters of their text."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(codec.tokenizer.decode(ids[:middle]).rstrip(DAMAGED)) <= num_chars:
            low = middle
        else:
            high = middle - 1
    return low


def first_call_end(
    codec: ChatCodec, said: Sequence[int], sampled: Sequence[int], tools: Sequence[ToolSchema]
) -> int | None:
    """How many of ``sampled``, behind ``said``, are a turn's that ends with the first call that an agent is given of
    it; None where it does not.

    An end that the policy samples itself is its own. Nothing ends with what may still be a thought."""
    ids = [*said, *sampled]
    turn = codec.parse(ids, tools)
    first = next(filter(is_readable, turn.calls), None)
    if first is None or turn.may_be_thought:
        return None
    more = [one for one in ids[first.end :] if one not in codec.stop_ids]
    return max(first.end - len(said), 0) if codec.tokenizer.decode(more).strip() else None


def head(sampled: Sampled, length: int) -> Sampled:
    """The first ``length`` tokens, each with its own log-prob and version."""
    spans = tuple(replace(one, end=min(one.end, length)) for one in sampled.spans if one.start < length)
    return replace(sampled, ids=sampled.ids[:length], logprobs=sampled.logprobs[:length], spans=spans)
