"""Leaves out of a request what its job says differs from one request to the next.

Rule: what is left out is gone before anything is compared, rendered or recorded, and named in ``TurnRequest.dropped``.
It is looked for in what the agent itself wrote, system and user messages, in time that grows with the text alone,
whatever the pattern.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from gspo_core.messages import Message
from services.gateway.canonical import of_messages
from services.gateway.dialects.asks import with_digest
from services.gateway.dialects.turns import TurnRequest
from services.gateway.lengths import is_long


async def without_volatile(ask: TurnRequest, patterns: Mapping[str, str]) -> TurnRequest:
    """``patterns``: by their names."""
    if not patterns:
        return ask
    return await asyncio.to_thread(_without, ask, patterns) if is_long(ask) else _without(ask, patterns)


def _without(ask: TurnRequest, patterns: Mapping[str, str]) -> TurnRequest:
    messages, dropped = list[Message](), dict.fromkeys(ask.dropped)
    for message in ask.messages:
        text = message.get("content")
        if message["role"] in ("system", "user") and isinstance(text, str):
            for name, pattern in patterns.items():
                text, is_found = cut(text, pattern)
                if is_found:
                    dropped[name] = None
            message = {**message, "content": text}
        messages.append(message)
    if messages == list(ask.messages):
        return ask
    said = tuple(of_messages(messages)) if ask.said else ()
    return with_digest(replace(ask, messages=tuple(messages), dropped=tuple(dropped), said=said))


def cut(text: str, pattern: str) -> tuple[str, bool]:
    """``text`` without what ``pattern`` is found as, and whether it is. A line of which nothing is left is no line."""
    first, *others = pattern.split("*")
    kept, at, line_end, before, is_found = list[str](), 0, 0, "\n", False
    while (begin := text.find(first, at)) >= 0:
        if begin >= line_end:
            line_end = _or_end(text, text.find("\n", begin))
        end = _end(text, begin + len(first), line_end, others)
        if end is None:  # nor is it found further on in this line
            kept.append(text[at:line_end])
            at, before = line_end, ""
            continue
        is_found = True
        kept.append(text[at:begin])
        before = text[begin - 1] if begin > at else before
        is_line = before == "\n" and end == line_end
        at = min(end + 1, len(text)) if is_line else end
    return "".join([*kept, text[at:]]), is_found


def _end(text: str, begin: int, line_end: int, parts: list[str]) -> int | None:
    for number, part in enumerate(parts, start=1):
        if not part and number == len(parts):
            return line_end
        found = text.find(part, begin, line_end)
        if found < 0:
            return None
        begin = found + len(part)
    return begin


def _or_end(text: str, place: int) -> int:
    return len(text) if place < 0 else place
