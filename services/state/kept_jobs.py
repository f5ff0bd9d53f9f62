"""Jobs as they are: read one by one and in lists, and written down before a change of them is acknowledged.

If there are the jobs' directories, they are the truth: what the server lacks is restored from them before anything is
read, and each change is saved there. It changes no job.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from services.process.telemetry import get_logger
from services.state.functions import Functions
from services.state.jobs import (
    FIELDS_WITHOUT_SPEC,
    DamagedJob,
    InvalidCursor,
    JobNotFound,
    JobRecord,
    JobStatus,
    may_have_been,
    read_record,
)
from services.state.keys import InvalidJobId, job_key, job_keys, service_key

if TYPE_CHECKING:
    from services.files.job_records import JobRecords, SavedJobs
    from services.state.rebuild import Rebuild

STATUS_FIELDS = (
    *("status", "desired_state", "attempt", "epoch", "created_at", "started_at", "finished_at"),
    *("reason_code", "reason_message", "reason_since"),
    *("settings_version", "settings", "cancel_manner", "attempts", "went_back"),
)


class KeptJobs:
    """``now`` is the time of day in seconds, shown to people; no lease depends on it."""

    def __init__(
        self, functions: Functions, now: Callable[[], float], *, saved: SavedJobs | None, rebuild: Rebuild | None
    ) -> None:
        self._saved = saved
        self._rebuild = rebuild
        self._functions = functions
        self._redis = functions.redis
        self._now = now
        self._reported: set[str] = set()
        """Jobs whose record was found damaged."""

    async def get(self, job: str) -> JobRecord:
        """Raises JobNotFound."""
        return read_record(job, await self._fields(job))

    async def _fields(self, job: str) -> dict[bytes, bytes]:
        try:
            key = job_key(job, "job")
        except InvalidJobId:
            raise JobNotFound(job) from None
        fields: dict[bytes, bytes] = await self._redis.hgetall(key)
        if not fields and self._rebuild is not None:
            await self._rebuild.ensure()
            fields = await self._redis.hgetall(key)
        if not fields:
            raise JobNotFound(job)
        return fields

    async def page(
        self, limit: int = 20, after: str | None = None, *, before: str | None = None, order: str = "asc"
    ) -> list[JobRecord]:
        """Jobs by id, i.e. in order of creation; ``after`` and ``before`` are exclusive, and may have been removed.

        Raises InvalidCursor.
        """
        if order not in ("asc", "desc"):
            raise ValueError(f"order must be asc or desc, not {order!r}")
        await self._ensure_rebuilt()
        for cursor in (after, before):
            if cursor is None or may_have_been(cursor, self._now()):
                continue
            if await self._redis.zscore(service_key("jobs"), cursor) is None:
                raise InvalidCursor(f"there is no job {cursor!r} to continue from")
        found: list[JobRecord] = []
        while (num_wanted := limit - len(found)) > 0:
            ids = await self._ids(num_wanted, after, before, order)
            found += await self._get_many(ids)  # what was removed meanwhile is not among them
            if len(ids) < num_wanted:
                break
            after = ids[-1]
        return found

    async def _ids(self, limit: int, after: str | None, before: str | None, order: str) -> list[str]:
        lowest, highest = (after, before) if order == "asc" else (before, after)
        start, end = f"({lowest}" if lowest else "-", f"({highest}" if highest else "+"
        first, last = (start, end) if order == "asc" else (end, start)
        found = await self._redis.zrange(
            service_key("jobs"), first, last, desc=order == "desc", bylex=True, offset=0, num=limit
        )
        return [job.decode() for job in found]

    async def served(self) -> list[str]:
        """Jobs that rollout workers serve, oldest first."""
        jobs = await self._get_many(await self._open())
        return [job.id for job in jobs if job.status.is_served]

    async def queued(self) -> list[JobRecord]:
        """Jobs that wait for a trainer, oldest first."""
        return [job for job in await self._get_many(await self._open()) if job.status is JobStatus.QUEUED]

    async def unfinished(self) -> list[JobRecord]:
        """Jobs that are not over, oldest first."""
        return [job for job in await self._get_many(await self._open()) if not job.status.is_terminal]

    async def unowned(self) -> list[JobRecord]:
        """Jobs that are not over and that no trainer has, without their specifications."""
        jobs = await self._open()
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hget(job_key(job, "trainer"), "token")
            tokens = await pipeline.execute()
        found = [job for job, token in zip(jobs, tokens, strict=True) if not token]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in found:
                pipeline.hmget(job_key(job, "job"), *FIELDS_WITHOUT_SPEC)
            rows = await pipeline.execute()
        return [record for job, row in zip(found, rows, strict=True) if (record := self._open_one(job, row))]

    def _open_one(self, job: str, row: list[bytes | None]) -> JobRecord | None:
        fields = {
            name.encode(): value for name, value in zip(FIELDS_WITHOUT_SPEC, row, strict=True) if value is not None
        }
        record = self._readable(job, {b"spec": b"{}", **fields}) if fields else None
        return record if record is not None and record.finished_at is None else None

    async def _ensure_rebuilt(self) -> None:
        if self._rebuild is not None:
            await self._rebuild.ensure()

    def _directory(self, job: str) -> JobRecords | None:
        return None if self._saved is None else self._saved.of(job)

    async def _written_down(self, job: str) -> JobRecord:
        """The job's current state. On return this state (or a newer one) is on disk, whatever changed it."""
        fields = await self._fields(job)
        while self._saved is not None:
            directory = self._saved.of(job)
            read_record(job, fields)  # no file is written of what cannot be read
            record = {name: fields[name.encode()].decode() for name in STATUS_FIELDS if name.encode() in fields}
            if await self._saved.write(directory.write_status, int(fields[b"revision"]), record):
                break
            # The server was rolled back and reuses a revision that is on disk with other content.
            highest, _ = await asyncio.to_thread(directory.newest_status)
            await self._functions.call("pass_revision", job_keys(job), highest)
            fields = await self._fields(job)
        return read_record(job, fields)

    async def _all(self) -> AsyncIterator[JobRecord]:
        ids = [job.decode() for job in await self._redis.zrange(service_key("jobs"), 0, -1)]
        for first in range(0, len(ids), 100):
            for record in await self._get_many(ids[first : first + 100]):
                yield record

    async def _open(self) -> list[str]:
        members = await self._redis.smembers(service_key("open_jobs"))
        return sorted(member.decode() for member in members)

    async def _get_many(self, jobs: list[str]) -> list[JobRecord]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for job in jobs:
                pipeline.hgetall(job_key(job, "job"))
            replies = await pipeline.execute()
        return [
            record
            for job, fields in zip(jobs, replies, strict=True)
            if fields and (record := self._readable(job, fields)) is not None
        ]

    def _readable(self, job: str, fields: dict[bytes, bytes]) -> JobRecord | None:
        """None of a job whose record is damaged, which is reported once."""
        try:
            return read_record(job, fields)
        except DamagedJob as error:
            if job not in self._reported:
                self._reported.add(job)
                get_logger().error("a job's record in Redis cannot be read and is skipped", job=job, error=str(error))
            return None

    def _keys(self, job: str) -> list[str]:
        try:
            return job_keys(job)
        except InvalidJobId:
            raise JobNotFound(job) from None

    def _time(self) -> str:
        return datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
