"""The audit: one line for every request that changes something, kept in the data directory.

Rule: it names the key, the route, the outcome, and what was changed, with the old and the new values of that; never a
body, a secret, or what a policy said. A line that cannot be written goes to the log; the change stands.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from services.process.telemetry import get_logger

READING = frozenset({"GET", "HEAD", "OPTIONS"})
# A longer value is cut: a line must stay short enough to be written at once.
MAX_VALUE_CHARS = 500
_NOTHING: Mapping[str, Any] = {}

_changes: ContextVar[list[dict[str, Any]]] = ContextVar("changes of this request")


def changed(what: str, name: str, old: Mapping[str, Any] = _NOTHING, new: Mapping[str, Any] = _NOTHING) -> None:
    """Say in the audit that this request changed ``what`` under ``name``: the values that differ."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not keys:
        return
    before, after = ({key: _short(some.get(key)) for key in keys} for some in (old, new))
    record = {"what": what, "name": name[:200], **({"old": before} if old else {}), **({"new": after} if new else {})}
    _changes.get([]).append(record)


def _short(value: Any) -> Any:
    text = json.dumps(value, default=str)
    return value if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


class Audit:
    def __init__(self, append: Callable[[str], None]) -> None:
        """``append`` keeps a line."""
        self._append = append

    def begin(self) -> None:
        """A request begins; changes from now on count as its own."""
        _changes.set([])

    async def note(self, scope: Scope, request_id: str, status: int) -> None:
        if scope["method"] in READING:
            return
        caller = scope.get("caller")
        client = scope.get("client")
        record = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": request_id,
            "key": scope.get("credential"),
            "owner": caller.owner if caller else None,
            "address": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "changes": _changes.get([]),
        }
        try:
            await asyncio.to_thread(self._append, json.dumps(record, default=str))
        except OSError as error:
            get_logger().error("an audit record was lost", request_id=request_id, error=str(error))
