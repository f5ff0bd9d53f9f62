"""The events of a job as they are stored, one entry of its stream each, and as nouns.

Rule: an event is named by its entry, so a reader resumes after the last one it has seen. An event of type ``gap``
stands for what was trimmed. It does not interpret events.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GAP = "gap"


@dataclass(frozen=True, slots=True)
class JobEvent:
    id: str
    """Resume after this id."""
    type: str
    """``gap`` means that events up to this id are gone; data holds resumed_after and first_available."""
    created_at: str
    data: dict[str, Any]


def decode_event(entry: bytes, fields: Sequence[bytes]) -> JobEvent:
    """From names and values, alternating: the nonce of its writer beside them is of no use here."""
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    name = entry.decode()
    return JobEvent(name, found[b"type"].decode(), _time_of(name), json.loads(found[b"data"]))


def gap(last_removed: bytes, resumed_after: str, first: JobEvent | None) -> JobEvent:
    """What stands for the events up to ``last_removed``."""
    name = last_removed.decode()
    data = {"resumed_after": resumed_after, "first_available": None if first is None else first.id}
    return JobEvent(name, GAP, _time_of(name), data)


def _time_of(name: str) -> str:
    import numpy as np  # which formats a time and has no clock

    return f"{np.datetime64(int(name.partition('-')[0]), 'ms')}Z"
