"""Who changed what: one line for every request that changes something, kept in the data directory.

One rule: it names the key, the route and the outcome, never a body, a parameter or a secret. A line that cannot be
written goes to the log; the change stands.
"""

from __future__ import annotations

import asyncio
import json
import os
from datetime import UTC, datetime
from pathlib import Path

from starlette.types import Scope

from services.process.telemetry import get_logger

READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Audit:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def note(self, scope: Scope, request_id: str, status: int) -> None:
        if scope["method"] in READING:
            return
        caller = scope.get("caller")
        record = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": request_id,
            "key": scope.get("credential"),
            "owner": caller.owner if caller else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
        }
        try:
            await asyncio.to_thread(self._append, json.dumps(record) + "\n")
        except OSError as error:
            get_logger().error("an audit record was lost", request_id=request_id, error=str(error))

    def _append(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write of a short line at the end of the file: lines of several processes do not mix.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
