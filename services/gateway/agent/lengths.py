"""Tells long requests from short ones, and those that cannot fit the model before they are encoded as a whole.

Rule: nobody is refused who might fit. A text that is cut has other ids at its cuts alone, far fewer than what it is
given beyond the limit. What the policy itself has said may be left out by a template, as far as it is a thought: all
that is said is refused only where it is many times what fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gspo_core.chat.text import text_of, to_json
from services.gateway.dialects.turns import TurnRequest

T = TypeVar("T")

# Encoding more takes milliseconds for each of many at once, in which nobody else is answered.
LONG_BYTES = 8 << 10
# Of texts that people write a token has fewer: what has more for each token that fits is looked at first.
MOST_BYTES_A_TOKEN = 8
_PIECE_CHARS = 64 << 10
# What takes longer has threads of its own: all others would wait for it in theirs.
_HUGE_BYTES = 64 << 10
_FOR_HUGE = ThreadPoolExecutor(2, "huge requests")
_MARGIN = 2
_MOST_TIMES = 16


def is_long(ask: TurnRequest) -> bool:
    return ask.num_bytes > LONG_BYTES


def may_be_too_long(ask: TurnRequest, num_most: int) -> bool:
    """Whether it is to be looked at before it is encoded."""
    return ask.num_bytes > MOST_BYTES_A_TOKEN * _MARGIN * num_most


async def beside(ask: TurnRequest, work: Callable[..., T], *given: object) -> T:
    """Beside the event loop."""
    threads = _FOR_HUGE if ask.num_bytes > _HUGE_BYTES else None
    return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *given))


def num_beyond(ask: TurnRequest, encode: Callable[[str], Sequence[int]], num_most: int) -> int | None:
    """So many tokens at least, where they are more than twice as many as fit; None where they may be fewer."""
    for texts, times in ((_read_whole(ask), _MARGIN), (_all(ask), _MOST_TIMES)):
        num_tokens = 0
        for piece in _pieces(texts):
            num_tokens += len(encode(piece))
            if num_tokens > times * num_most:
                return num_tokens // times
    return None


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for begin in range(0, len(text), _PIECE_CHARS):
            yield text[begin : begin + _PIECE_CHARS]


def _read_whole(ask: TurnRequest) -> Iterator[str]:
    """Texts that every template shows the model: of its own words some leave out what it thought, and of others' the
    blanks around them."""
    yield from (tool["function"].get("description", "").strip() for tool in ask.tools)
    yield from (text_of(message).strip() for message in ask.messages if message["role"] != "assistant")


def _all(ask: TurnRequest) -> Iterator[str]:
    yield from map(to_json, ask.tools)
    for message in ask.messages:
        yield text_of(message).strip()
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call)["arguments"]
            yield arguments if isinstance(arguments, str) else to_json(arguments)
