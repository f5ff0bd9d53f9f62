"""How many values and names a JSON text would become, counted without making any of them.

Rule: what stands in a text is no value, except in the texts of calls' arguments, which are JSON again and are read.
It counts too many rather than too few: an empty list is two. It does not say whether the text is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_ARGUMENTS = b'"arguments"'
# Counting in more at once holds the interpreter, so that nobody is answered meanwhile.
_PIECE_BYTES = 1 << 20


def has_more_nodes(text: bytes | bytearray, most: int) -> bool:
    """It takes a time that grows with ``most``, and little with the length of the text."""
    if _nodes(text, 0, len(text)) <= most:  # so nearly always: it counts what stands in texts, too
        return False
    count, end, name = 0, 0, b""
    for string in _STRING.finditer(text):
        start, before = string.start(), end
        end = string.end()
        is_arguments = name == _ARGUMENTS or b"\\" in name  # the name may be spelled with escapes
        if is_arguments and text[before:start].strip() == b":":
            count += _nodes(text, before, end)
        else:
            count += 1 + _signs(text, before, start)
        if count > most:
            return True
        name = string.group() if end - start <= 6 * len(_ARGUMENTS) else b""
    return count + _signs(text, end, len(text)) > most


def _nodes(text: bytes | bytearray, start: int, end: int) -> int:
    return _signs(text, start, end) + _count(text, (b'"',), start, end) // 2


def _signs(text: bytes | bytearray, start: int, end: int) -> int:
    return _count(text, (b",", b"[", b"{"), start, end)


def _count(text: bytes | bytearray, signs: Iterable[bytes], start: int, end: int) -> int:
    pieces = ((begin, min(begin + _PIECE_BYTES, end)) for begin in range(start, end, _PIECE_BYTES))
    return sum(text.count(sign, *piece) for piece in pieces for sign in signs)
