"""Reads what an agent is given out of the ids that the policy sampled.

Rule: text is read from ids, never the other way round. What cannot be read as a call stays in the text as it was
sampled, so nothing that the policy wrote is hidden from the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gspo_core.chat import ChatCodec
from gspo_core.messages import CallStatus, ParsedTurn, ToolCall, ToolSchema
from services.engines.protocol import Span
from services.episodes.policy import Sampled
from services.gateway.turns import Piece

# A character whose bytes are not all there yet.
_DAMAGED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Reading:
    """One turn as an agent sees it."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    parsed: ParsedTurn


def read(
    codec: ChatCodec,
    sampled: Sequence[int],
    tools: Sequence[ToolSchema],
    overlap: str = "",
    *,
    gives_calls: bool = True,
) -> Reading:
    """``overlap``: what the text ends with and the agent is not to see. Without ``gives_calls`` all calls are text."""
    parsed = codec.parse(sampled, tools)
    calls = tuple(call for call in parsed.calls if _is_readable(call) and gives_calls)
    text = parsed.text
    if len(calls) < len(parsed.calls):
        odd = [codec.tokenizer.decode(sampled[one.start : one.end]) for one in parsed.calls if one not in calls]
        text = "\n".join([text, *odd]).strip()
    hidden = overlap.rstrip()
    if hidden and text.endswith(hidden):
        text = text.removesuffix(hidden).rstrip()
    return Reading(text, parsed.reasoning, calls, parsed)


def _is_readable(call: ToolCall) -> bool:
    """What was never offered is no call that an agent could answer: many an agent's program ends at it."""
    return call.status is CallStatus.OK and isinstance(call.arguments, dict)


def certain(codec: ChatCodec, sampled: Sequence[int], tools: Sequence[ToolSchema], num_held: int) -> Piece:
    """Text and reasoning that will not change, whatever is sampled next; ``num_held`` characters may be a stop text."""
    parsed = codec.parse(sampled, tools)
    may_be_call = not parsed.calls and parsed.text.startswith("{")
    text = "" if may_be_call else parsed.text
    if num_held and not parsed.calls:
        text = text[:-num_held]
    return Piece(text.rstrip(_DAMAGED).rstrip(), parsed.reasoning.rstrip(_DAMAGED).rstrip())


def stop_text_in(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop text begins, and which it is."""
    found = [(place, stop) for stop in stops if stop and (place := text.find(stop)) >= 0]
    return min(found, default=None)


def num_tokens_before(codec: ChatCodec, ids: Sequence[int], first: int, num_chars: int) -> int:
    """How many ids, not fewer than ``first``, say no more than the first ``num_chars`` characters of their text."""
    low, high = first, len(ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(codec.tokenizer.decode(ids[:middle]).rstrip(_DAMAGED)) <= num_chars:
            low = middle
        else:
            high = middle - 1
    return low


def head(sampled: Sampled, length: int) -> Sampled:
    """The first ``length`` tokens, each with its own log-prob and version."""
    generation = sampled.generation
    if length >= len(generation.output_ids):
        return sampled
    spans = tuple(Span(one.label, min(one.start, length), min(one.end, length)) for one in generation.spans)
    cut = replace(
        generation, output_ids=generation.output_ids[:length], logprobs=generation.logprobs[:length], spans=spans
    )
    return replace(sampled, generation=cut)
