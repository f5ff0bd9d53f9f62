"""Reads server-sent events from their lines. It opens no connection and gives none up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from gspo_core.api_answers import Event


def parse_events(lines: Iterable[str]) -> Iterator[Event | None]:
    """Server-sent events from their lines, None for a ping. An event whose closing empty line is missing was cut."""
    event_id, kind, data = "", "message", list[str]()
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line.startswith(":"):
            yield None
        elif not line:
            if data:
                yield Event(event_id, kind, json.loads("\n".join(data)))
            event_id, kind, data = "", "message", []
        elif name == "id":
            event_id = value
        elif name == "event":
            kind = value
        elif name == "data":
            data.append(value)
