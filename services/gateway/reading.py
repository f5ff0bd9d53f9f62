"""Reads what an agent is given out of the ids that the policy sampled.

Rule: text is read from ids, never the other way round. What cannot be read as a call stays in the text as it was
sampled, so nothing that the policy wrote is hidden from the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from gspo_core.chat import ChatCodec
from gspo_core.json_value import JSON
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall, ToolSchema
from services.gateway.endings import DAMAGED


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
) -> Reading:
    """``overlap``: as a turn's entry has it. Without ``gives_calls`` all calls are text."""
    parsed = codec.parse(sampled, tools)
    calls = tuple(call for call in parsed.calls if _is_readable(call) and gives_calls)
    text = parsed.text
    if len(calls) < len(parsed.calls):
        odd = [codec.tokenizer.decode(sampled[one.start : one.end]) for one in parsed.calls if one not in calls]
        text = "\n".join([text, *odd]).strip()
    hidden = overlap.rstrip()
    if hidden and text.endswith(hidden):
        text = text.removesuffix(hidden).rstrip()
    num_behind = max(len(text) - len(_before(codec, sampled, parsed)), 0) if calls else 0
    return Reading(text, parsed.reasoning, calls, parsed, num_behind)


def _before(codec: ChatCodec, sampled: Sequence[int], parsed: ParsedTurn) -> str:
    """The text before the first readable call, with what stands there and is none."""
    odd = takewhile(lambda call: not _is_readable(call), parsed.calls)
    return "\n".join([parsed.text, *(codec.tokenizer.decode(sampled[one.start : one.end]) for one in odd)]).strip()


def _is_readable(call: ToolCall) -> bool:
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
    calls = tuple(call for call in parsed.calls if call.is_final and _is_readable(call) and gives_calls)
    if calls:
        return Reading(_before(codec, ids, parsed), parsed.reasoning, calls, parsed)
    may_be_call = not parsed.calls and parsed.text.startswith("{")
    text = "" if may_be_call else parsed.text
    return Reading(text.rstrip(DAMAGED).rstrip(), parsed.reasoning.rstrip(DAMAGED).rstrip(), (), parsed)
