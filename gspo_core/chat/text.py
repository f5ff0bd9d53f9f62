"""Messages as the text and JSON that chat formats are written in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gspo_core.messages import Message


def text_of(message: Message | None) -> str:
    """The text of a message. Raises ``ValueError`` where it holds something else."""
    content = None if message is None else message.get("content")
    if message is None or content is None:
        return ""
    if isinstance(content, str):
        return content
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    raise ValueError(f"this codec renders text only, but a {message['role']} message has other content parts")


def to_json(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def strict_json(text: str) -> Any:
    """The value of JSON text. Raises ``ValueError``, for NaN and for what is nested too deep as well."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
