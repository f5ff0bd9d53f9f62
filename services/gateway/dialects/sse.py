"""Server-sent events on the wire."""

from __future__ import annotations

import msgspec

from gspo_core.json_value import JSON

COMMENT = b": waiting\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(data: JSON, name: str = "") -> bytes:
    """JSON has no bare line ends, so the data is one line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"
