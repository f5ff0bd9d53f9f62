"""What processes tell of a job while it runs: descriptions of its environments, its events, its metrics by step.

The rules: the first description of an environment stands, because tasks are drawn from its numbers, and the trainer
runs no environment code. Events are a stream that clients follow and resume without gaps or duplicates: only our own
function trims it, and records the last id that it removed, so a client that resumes before that id gets an event of
type ``gap``; adding an event twice under one nonce adds it once. A step has one value per metric, the last one written;
one that was trained is reported with its event in one call, once, and that replaces all that was said of the step
before, in a history that was left. Nothing here validates, interprets or computes what it is told.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from gspo_core.log.events import JobEvent, decode_event, gap
from gspo_core.position import Position
from services.state.client import MAX_BLOCK_MS
from services.state.functions import Functions
from services.state.jobs import InvalidCursor, JobNotFound
from services.state.keys import job_key, job_keys
from services.state.refusals import Damaged, Missing

if TYPE_CHECKING:
    from services.files.job_records import SavedJobs

# Redis does nothing else while it reads, and all steps of a long job take it seconds.
STEPS_AT_ONCE = 200
_POSITION = re.compile(r"[0-9]{1,16}(-[0-9]{1,16})?")


class EnvironmentDescriptions:
    """``saved``: the jobs' directories, if this process writes there."""

    def __init__(self, functions: Functions, saved: SavedJobs | None) -> None:
        self._functions = functions
        self._saved = saved

    async def describe(self, job: str, index: int, description: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the description that stands: the first one, because tasks are drawn from its numbers.

        Raises JobNotFound.
        """
        text = encode_description(dict(description))
        try:
            held = await self._functions.call("describe_environment", job_keys(job), index, text)
        except Missing:
            raise JobNotFound(job) from None
        return _description(held)

    async def get(self, job: str, index: int) -> dict[str, Any] | None:
        """If this process has the job's directory, the returned description is already saved there."""
        held = await self._functions.redis.hget(job_key(job, "environments"), str(index))
        if held is None:
            return None
        try:
            description = _description(held)
        except ValueError as error:
            raise Damaged(f"the description of environment {index}: {error}") from None
        if self._saved is not None:
            await self._saved.write(self._saved.of(job).write_environment, index, description)
        return description


def encode_description(description: dict[str, Any]) -> str:
    """An environment's description as the server stores it."""
    return json.dumps(description, sort_keys=True, allow_nan=False)


def _description(text: bytes) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(text)
    return description


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


class MetricSeries:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._redis = functions.redis

    async def add(self, job: str, step: int, metrics: Mapping[str, float], *, token: str | None = None) -> None:
        """Add values to a step, overwriting existing names. All values must be finite.

        With a ``token`` only the owner may add (else Fenced). Raises JobNotFound.
        """
        flat = _flat(step, metrics)
        try:
            await self._functions.call("add_metrics", job_keys(job), token or "", step, *flat)
        except Missing:
            raise JobNotFound(job) from None

    async def report(
        self, job: str, at: Position, metrics: Mapping[str, float], event: Mapping[str, Any], *, token: str
    ) -> None:
        """The numbers of a step that was trained, and the event ``step``; nothing where it, or a later one, was
        reported before. Raises Fenced, JobNotFound."""
        flat, text = _flat(at.step, metrics), json.dumps(dict(event), separators=(",", ":"), allow_nan=False)
        try:
            await self._functions.call("report_step", job_keys(job), token, at.epoch, at.step, text, *flat)
        except Missing:
            raise JobNotFound(job) from None

    async def reported(self, job: str) -> Position | None:
        """The last step that ``report`` was given; None if it never was."""
        epoch, step = await self._redis.hmget(job_key(job, "job"), "reported_epoch", "reported_step")
        return None if epoch is None else Position(int(epoch), int(step))

    async def read(self, job: str, from_step: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """One dict per step, in order: ``{"step": n, name: value, ...}``; with a ``limit`` the first so many of them.

        What is no step is passed over. Steps may be added, or taken again, while others are read.
        """
        found: list[dict[str, Any]] = []
        while limit is None or len(found) < limit:
            count = STEPS_AT_ONCE if limit is None else min(STEPS_AT_ONCE, limit - len(found))
            rows = await self._functions.call("read_metrics", job_keys(job), from_step, count)
            some = [_row(row) for row in rows if row[0].isdigit()]
            found += some
            if len(rows) < count:
                break
            from_step = max([from_step, *(row["step"] for row in some)]) + 1
        return found[:limit]  # the functions of an earlier release count no steps


def _flat(step: int, metrics: Mapping[str, float]) -> list[str]:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name} of step {step} is not a finite number: {value}")
    return [text for name, value in metrics.items() for text in (name, repr(float(value)))]


def _row(row: list[bytes]) -> dict[str, Any]:
    names, order = _layout(tuple(row[1::2]))
    values = row[2::2]
    return {"step": int(row[0]), **{name: float(values[place]) for name, place in zip(names, order, strict=True)}}


@lru_cache(maxsize=256)
def _layout(names: tuple[bytes, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The sorted names and the position of each value; the steps of a job share them."""
    order = sorted(range(len(names)), key=lambda place: names[place].decode())
    return tuple(names[place].decode() for place in order), tuple(order)
