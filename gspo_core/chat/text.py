"""Converts messages to the text and JSON of chat formats."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NoReturn

from gspo_core.json_value import JSON
from gspo_core.messages import Message, ToolSchema, other_parts

MAX_DEPTH = 64
"""Maximum nesting of JSON from a policy, so that every process that forwards it can serialize it."""


class NotText(ValueError):
    """A message holds something else than text, such as an image, and no model here reads that."""


def text_of(message: Message | None) -> str:
    """The text of a message. Raises ``NotText`` for any other content."""
    content = None if message is None else message.get("content")
    if message is None or content is None:
        return ""
    if isinstance(content, str):
        return content
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    others = ", ".join(other_parts(message))
    raise NotText(f"models read text only here, but a {message['role']} message holds content of type {others}")


def to_json(value: JSON | ToolSchema) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def strict_json(text: str) -> JSON:
    """The value of JSON text. Raises ``ValueError``, also if it cannot be written as JSON again: NaN, numbers beyond
    any float, or nesting that is too deep."""
    begin = len(text) - len(text.lstrip(_BLANK))
    value, end = strict_json_at(text, begin)
    if text[end:].strip(_BLANK):
        raise ValueError(f"more text behind the JSON, at character {end}")
    return value


def strict_json_at(text: str, begin: int) -> tuple[JSON, int]:
    """The value that begins at ``begin`` and where it ends. Raises like ``strict_json``."""
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except RecursionError:
        raise ValueError("nested too deep") from None
    is_nested = isinstance(value, dict | list)
    if is_nested and text.count("[", begin, end) + text.count("{", begin, end) > MAX_DEPTH and _is_deeper(value):
        raise ValueError("nested too deep")
    return value, end


def _is_deeper(value: JSON) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is more than a number can be")
    return number


_BLANK = " \t\n\r"
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
