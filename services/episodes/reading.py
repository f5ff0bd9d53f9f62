"""Reads what an agent is given out of the ids that the policy sampled.

Rule: text is read from ids, never the other way round. What cannot be read as a call stays in the text as it was
sampled, and so do words between calls and behind them: nothing that the policy wrote is hidden from the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gspo_core.chat import ChatCodec
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall, ToolSchema

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
