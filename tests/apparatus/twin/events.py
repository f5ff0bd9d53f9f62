"""The events of a job in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from services.state.events import JobEvent
from tests.apparatus.twin.world import TwinJob, World

EVENTS_KEPT, EVENTS_STRIDE = 10_000, 500


async def add_event(world: World, job: TwinJob, kind: str, data: Mapping[str, Any], now: float) -> str:
    plain = json.loads(json.dumps(dict(data), allow_nan=False))
    last = place_of(job.last_event)
    milliseconds = max(int(now * 1000), last[0])
    number = last[1] + 1 if milliseconds == last[0] else 0
    job.last_event = f"{milliseconds}-{number}"
    job.events.append(JobEvent(job.last_event, kind, time_of(job.last_event), plain))
    if len(job.events) >= EVENTS_KEPT + EVENTS_STRIDE:
        trim(job, EVENTS_KEPT)
    async with world.news:
        world.news.notify_all()
    return job.last_event


def trim(job: TwinJob, keep: int) -> None:
    excess = len(job.events) - keep
    if excess > 0:
        job.last_trimmed = job.events[excess - 1].id
        del job.events[:excess]


def events_after(job: TwinJob, after: str, count: int) -> list[JobEvent]:
    found = [event for event in job.events if place_of(event.id) > place_of(after)][:count]
    if job.last_trimmed and place_of(after) < place_of(job.last_trimmed):
        data = {"resumed_after": after, "first_available": found[0].id if found else None}
        found.insert(0, JobEvent(job.last_trimmed, "gap", time_of(job.last_trimmed), data))
    return found


def place_of(event_id: str) -> tuple[int, int]:
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number or 0)


def time_of(event_id: str) -> str:
    moment = datetime.fromtimestamp(place_of(event_id)[0] / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
