"""Leaves out of a request what its job says differs from one request to the next.

Rule: what is left out is gone before anything is compared, rendered or recorded, and named in ``TurnRequest.left_out``.
It is looked for in what the agent itself wrote, system and user messages, at a bounded number of places: who writes
patterns, and texts for them, holds up nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gspo_core.messages import Message
from services.episodes.canonical import of_messages
from services.gateway.agent.lengths import beside, is_long
from services.gateway.dialects.asks import with_digest
from services.gateway.dialects.turns import TurnRequest

# Of each pattern in a request: where its first words stand. Each costs a microsecond; what stands behind them stays.
MOST_PLACES = 1000


async def without_volatile(ask: TurnRequest, patterns: Mapping[str, str]) -> TurnRequest:
    """``patterns``: by their names."""
    if not patterns:
        return ask
    return await beside(ask, _without, ask, patterns) if is_long(ask) else _without(ask, patterns)


def _without(ask: TurnRequest, patterns: Mapping[str, str]) -> TurnRequest:
    messages, left_out = [*ask.messages], list[str]()
    for name, pattern in patterns.items():
        if _leave_out(messages, pattern):
            left_out.append(name)
    if not left_out:
        return ask
    said = tuple(of_messages(messages)) if ask.said else ()
    return with_digest(replace(ask, messages=tuple(messages), left_out=tuple(left_out), said=said))


def _leave_out(messages: list[Message], pattern: str) -> bool:
    """Whether there was any of it."""
    parts, num_left, is_found = pattern.split("*"), MOST_PLACES, False
    for number, message in enumerate(messages):
        text = message.get("content")
        if message["role"] in ("system", "user") and isinstance(text, str) and all(part in text for part in parts):
            kept, num_places = cut(text, parts, num_left)
            num_left -= num_places
            if kept != text:
                messages[number] = {**message, "content": kept}
                is_found = True
    return is_found


def cut(text: str, parts: Sequence[str], most: int) -> tuple[str, int]:
    """``text`` without what is found of these parts, each the next one in the same line, and at how many places it was
    looked for. A line of which nothing is left is no line."""
    kept, at, line_end, before, num_places = list[str](), 0, 0, "\n", 0
    while num_places < most and (begin := text.find(parts[0], at)) >= 0:
        num_places += 1
        if begin >= line_end:
            line_end = _or_end(text, text.find("\n", begin))
        end = _end(text, begin + len(parts[0]), line_end, parts[1:])
        if end is None:  # nor is it found further on in this line
            kept.append(text[at:line_end])
            at, before = line_end, ""
            continue
        kept.append(text[at:begin])
        before = text[begin - 1] if begin > at else before
        is_line = before == "\n" and (end == line_end or text.startswith("\r\n", end))
        at = min(line_end + 1, len(text)) if is_line else end
    return "".join([*kept, text[at:]]), num_places


def _end(text: str, begin: int, line_end: int, parts: Sequence[str]) -> int | None:
    for number, part in enumerate(parts, start=1):
        if not part and number == len(parts):
            return line_end - text.endswith("\r", begin, line_end)
        found = text.find(part, begin, line_end)
        if found < 0:
            return None
        begin = found + len(part)
    return begin


def _or_end(text: str, place: int) -> int:
    return len(text) if place < 0 else place
