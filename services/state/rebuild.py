"""Restores every job that a server lost, from the job's directory.

The rule: the directory only adds. Newer server data (a higher revision, a version it holds) stays, so this may run at
any time, in any number of processes, beside everything else. The queue is not restored: the trainer that claims a job
dispatches again what its lineage owes, and checkpoint and batch log decide what was trained.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar
from uuid import uuid4

from services.files.job_dir import JobDir, JobsDir
from services.files.job_records import AcceptedJob, DamagedRecord, JobRecords, VersionRecord, reported_steps
from services.process.telemetry import get_logger
from services.state.functions import Functions
from services.state.jobs import DesiredState, JobStatus, default_reason
from services.state.keys import InvalidJobId, check_job_id, job_keys, service_key, service_keys
from services.state.refusals import Missing
from services.state.reports import encode_description

T = TypeVar("T")

VERSIONS_PER_CALL = 100
# The same limit as the server's.
METRIC_STEPS = 20000
NO_METRICS = ("step", "version", "epoch")
MAX_TRIES = 10


class Rebuild:
    """Loads the jobs in ``jobs_dir`` into the server."""

    def __init__(self, functions: Functions, jobs_dir: JobsDir) -> None:
        self._functions = functions
        self._jobs_dir = jobs_dir
        self._running = asyncio.Lock()

    async def ensure(self) -> None:
        """Run, unless this server was already rebuilt. The check costs one short query."""
        if not await self._is_done():
            async with self._running:
                if not await self._is_done():
                    await self.run()

    async def run(self) -> int:
        """Rebuild regardless of the server's data; returns the number of jobs that were missing or outdated."""
        for _ in range(MAX_TRIES):
            begun = await self._functions.call("begin_rebuild", service_keys(), uuid4().hex)
            count = await self._restore_all()
            if await self._functions.call("finish_rebuild", service_keys(), begun):
                return count
        raise RuntimeError(f"Redis was wiped {MAX_TRIES} times while its jobs were being restored")

    async def _is_done(self) -> bool:
        return bool(await self._functions.redis.hexists(service_key("rebuild"), "done"))

    async def _restore_all(self) -> int:
        count = 0
        for job, directory in await asyncio.to_thread(self._answered_first):
            try:
                count += await self._restore(check_job_id(job), JobRecords(directory))
            except Missing:
                return count  # the server was wiped meanwhile; the end of this round notices
            except (DamagedRecord, InvalidJobId, TypeError, OSError) as error:
                # One damaged directory must not block all other jobs.
                get_logger().error("job not restored", job=job, error=f"{type(error).__name__}: {error}")
        if count:
            get_logger().warning("jobs restored from their directories: Redis had lost them", num_jobs=count)
        return count

    def _answered_first(self) -> list[tuple[str, JobDir]]:
        """A job without a state may have been withdrawn by now, or be about to be, for another one of its key."""
        return sorted(self._jobs_dir.accepted().items(), key=lambda job: not job[1].statuses.is_dir())

    async def _restore(self, job: str, directory: JobRecords) -> int:
        accepted, (revision, fields) = await asyncio.to_thread(
            lambda: (directory.accepted(), directory.newest_status())
        )
        if accepted.idempotency is not None:
            holder = await self._functions.call("reserve", service_keys(), accepted.idempotency, job)
            if not fields and holder.decode() != job:
                return 0  # another job has its key: no caller knows this one, and none will
        record = {"spec": accepted.spec, "digest": accepted.digest, **(fields or _at_first(accepted))}
        flat = [text for item in record.items() for text in item]
        restored = int(await self._functions.call("restore_job", job_keys(job), max(revision, 1), *flat))
        if restored:
            await self._restore_environments(job, directory)
            await self._restore_metrics(job, directory)
        # Even if the record is current: versions are saved apart from it.
        await self._restore_versions(job, await asyncio.to_thread(directory.versions))
        # Last, so that a listed job is complete.
        await self._functions.call("announce", service_keys(), job)
        return restored

    async def _restore_environments(self, job: str, directory: JobRecords) -> None:
        for index, description in (await asyncio.to_thread(directory.environments)).items():
            await self._functions.call("describe_environment", job_keys(job), index, encode_description(description))

    async def _restore_versions(self, job: str, versions: Sequence[VersionRecord]) -> None:
        for some in _chunks(versions, VERSIONS_PER_CALL):
            flat = [value for one in some for value in (one.version, one.step, one.manifest)]
            await self._functions.call("restore_versions", job_keys(job), *flat)

    async def _restore_metrics(self, job: str, directory: JobRecords) -> None:
        lines = await asyncio.to_thread(lambda: list(directory.metrics()))
        # First, so that rows that are not restored yet are not reported again.
        if reported := max(reported_steps(lines), default=None):
            await self._functions.call("mark_reported", job_keys(job), *reported)
        for step, values in sorted(_rows(lines).items())[-METRIC_STEPS:]:
            flat = [text for name, value in values.items() for text in (name, repr(value))]
            if flat:
                await self._functions.call("add_metrics", job_keys(job), "", step, *flat)


def _at_first(accepted: AcceptedJob) -> dict[str, str]:
    """The state of a job that was accepted and has no later records."""
    reason = default_reason(JobStatus.QUEUED)
    return {
        "created_at": accepted.created_at,
        "owner": accepted.owner,
        "status": JobStatus.QUEUED.value,
        "desired_state": DesiredState.RUNNING.value,
        "attempt": "0",
        "epoch": "0",
        "reason_code": reason.code,
        "reason_message": reason.message,
        "reason_since": accepted.created_at,
    }


def _rows(lines: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """The numbers of each step. Its report, which has a version, replaces what an earlier history said of it."""
    rows = dict[int, dict[str, float]]()
    for line in lines:
        step = line.get("step")
        if isinstance(step, int):
            said = {} if "version" in line else rows.get(step, {})
            told = {name: float(value) for name, value in line.items() if name not in NO_METRICS and _is_number(value)}
            rows[step] = said | told
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _chunks(values: Sequence[T], size: int) -> list[list[T]]:
    rest = iter(values)
    return [some for _ in range(0, len(values), size) if (some := list(islice(rest, size)))]
