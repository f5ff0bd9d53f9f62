"""The events of a job: a stream that clients follow and resume without gaps or duplicates.

The rule: only our own function trims, and it records the last id it removed, so a client that resumes before that id
gets an event of type ``gap``. Adding an event twice under one nonce adds it once. It does not interpret events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from gspo_core.log.events import JobEvent, decode_event, gap
from services.state.client import MAX_BLOCK_MS
from services.state.functions import Functions
from services.state.jobs import InvalidCursor, JobNotFound
from services.state.keys import job_key, job_keys
from services.state.refusals import Missing

_POSITION = re.compile(r"[0-9]{1,16}(-[0-9]{1,16})?")


class EventLog:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._redis = functions.redis

    async def add(
        self, job: str, kind: str, data: Mapping[str, Any], *, token: str | None = None, nonce: str | None = None
    ) -> str:
        """Returns the event's id. The store itself writes events of type ``job.status``.

        Under a ``nonce`` it is added once, for as long as it is kept.

        With a ``token`` only the owner may add (else Fenced), which keeps a former owner from reporting on the run.
        Raises JobNotFound.
        """
        text = json.dumps(dict(data), separators=(",", ":"), allow_nan=False)
        try:
            event_id: bytes = await self._functions.call(
                "add_event", job_keys(job), token or "", nonce or uuid4().hex, kind, text
            )
        except Missing:
            raise JobNotFound(job) from None
        return event_id.decode()

    async def read(self, job: str, after: str = "0", *, count: int = 100, block_ms: int = 0) -> list[JobEvent]:
        """Up to ``count`` events after the id ``after``, waiting at most ``block_ms`` for the first (0: no wait).

        If some of them were trimmed, the first is of type ``gap``. Raises InvalidCursor.
        """
        if not _POSITION.fullmatch(after):
            raise InvalidCursor(f"an event id has the form MILLISECONDS-NUMBER, not {after!r}")
        events = await self._read(job, after, count)
        if not events and block_ms:
            # Only a wait; the read below sees events and gap at one instant.
            await self._redis.xread({job_key(job, "events"): after}, count=1, block=min(block_ms, MAX_BLOCK_MS))
            events = await self._read(job, after, count)
        return events

    async def newest(self, job: str) -> str | None:
        """The id of the newest retained event."""
        found = await self._redis.xrevrange(job_key(job, "events"), count=1)
        return found[0][0].decode() if found else None

    async def trim(self, job: str, keep: int) -> None:
        """Remove all but the newest ``keep`` events now; the store trims on its own beyond ten thousand."""
        await self._functions.call("trim_events", job_keys(job), keep)

    async def _read(self, job: str, after: str, count: int) -> list[JobEvent]:
        last_removed, entries = await self._functions.call("read_events", job_keys(job), after, count)
        events = [decode_event(entry, fields) for entry, fields in entries]
        if last_removed:
            events.insert(0, gap(last_removed, after, events[0] if events else None))
        return events
