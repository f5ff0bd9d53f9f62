"""JSON as the standard has it, which is less than Python's own reader takes.

One rule: a text that two readers could understand differently is refused: duplicate keys, NaN and infinity (spelled
out, or by overflow), nesting that exhausts a stack. It does not bound sizes; the receiver of the text does.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from gspo_core.json_value import JSON

# Deep enough for anything that a person writes; far from where Python's own stack ends.
MAX_DEPTH = 64
# Half of a pair can be written in JSON, but is no text that could be tokenized or told again.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class TextRejected(ValueError):
    """A text is not well formed. `line` and `column` count from 1 where the place is known."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


def parse(text: str | bytes | bytearray) -> JSON:
    """The value of a JSON text (UTF-8 unless it is a ``str``)."""
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        value: JSON = json.loads(decoded, object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise TextRejected(error.msg[:1].lower() + error.msg[1:], error.lineno, error.colno) from None
    except UnicodeDecodeError as error:
        raise TextRejected(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise TextRejected(f"nested deeper than {MAX_DEPTH} levels") from None
    except TextRejected:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise TextRejected(str(error)) from None
    _check_depth(value)
    return value


def typed_value(text: str) -> JSON:
    """What a person typed: JSON, else the text itself. Raises TextRejected for JSON that the standard does not have."""
    try:
        json.loads(text)
    except RecursionError:
        pass  # told below
    except ValueError:
        return text
    return parse(text)


def has_half_a_character(text: bytes | bytearray, value: JSON) -> bool:
    """Whether the value of the text holds half of a surrogate pair, which no UTF-8 can say."""
    if _SURROGATE.search(text) is None:
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise TextRejected(f"the key {twice!r} occurs twice in one object")
    return made


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise TextRejected(f"the number {digits} is too large")
    return number


def _no_constant(word: str) -> NoReturn:
    raise TextRejected(f"{word} is not a JSON number")


def _check_depth(value: JSON) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:
            raise TextRejected(f"nested deeper than {MAX_DEPTH} levels")
        inner: list[JSON] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = inner
