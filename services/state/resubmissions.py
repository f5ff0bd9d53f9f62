"""Finds the job of an earlier request, for a client that sends the request again without a key.

Rule: before a job is created its id is noted under the caller and the body; the OpenAI client, which marks what it
sends again, then gets the job of its lost answer. After ten minutes the same body is a new job.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from services.state.client import RedisClient
from services.state.jobs import new_job_id
from services.state.keys import service_key

WINDOW_S = 600.0
MAX_NOTES = 1000
_NOTES = service_key("resent")


class Resubmissions:
    def __init__(self, redis: RedisClient, now: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._now = now

    async def job_id(self, caller: str, body: Mapping[str, Any], *, is_repetition: bool) -> str:
        """The id to create the job under."""
        digest = hashlib.sha256(json.dumps([caller, body], sort_keys=True).encode()).hexdigest()
        now = self._now()
        if is_repetition:
            noted = await self._redis.hget(_NOTES, digest)
            if noted is not None:
                job, _, at = _text(noted).partition(" ")
                if now - float(at) < WINDOW_S:
                    return str(job)
        job = new_job_id(now)
        await self._redis.hset(_NOTES, digest, f"{job} {now}")
        if await self._redis.hlen(_NOTES) > MAX_NOTES:
            await self._forget(now)
        return job

    async def _forget(self, now: float) -> None:
        notes = {
            field: float(_text(note).partition(" ")[2]) for field, note in (await self._redis.hgetall(_NOTES)).items()
        }
        oldest = sorted(notes, key=lambda field: notes[field])
        old = [field for field in oldest if now - notes[field] > WINDOW_S] or oldest[: MAX_NOTES // 10]
        await self._redis.hdel(_NOTES, *old)


def _text(reply: bytes | str) -> str:
    return reply.decode() if isinstance(reply, bytes) else reply
