"""Submitting a job in either dialect of the API: pins environments, and finds the job of a repeated request.

Rule: an accepted job stays accepted, whatever becomes of its environments; a repetition is compared with the original
job under the versions that the original was pinned to. It knows no routes.
"""

from __future__ import annotations

import asyncio

from gspo_core.spec import JobSpec
from services.api.http.access import Caller
from services.api.http.context import ApiContext
from services.api.submission.environment_refs import pin, pinned_as
from services.state.store import JobConflict, JobNotFound, JobRecord


async def submit(
    context: ApiContext, spec: JobSpec, caller: Caller, *, key: str | None, job_id: str, is_repetition: bool = False
) -> JobRecord:
    """A new job under ``job_id``, or the earlier one of the same key.

    ``is_repetition``: ``job_id`` was given to an earlier request, which may have made its job. Raises RequestRefused,
    JobConflict.
    """
    # Keys of different callers never meet: the same text from another caller neither sees nor blocks this job.
    own_key = f"{caller.name}:{key}" if key else None

    async def create(wanted: JobSpec) -> JobRecord:
        return await context.store.jobs.create(wanted, idempotency_key=own_key, job_id=job_id, owner=caller.owner)

    held = await _made_before(context, own_key, job_id, is_repetition=is_repetition)
    if held is None:
        pinned = await asyncio.to_thread(pin, spec, context.registry, caller, context.networks)
        try:
            return await create(pinned)
        except JobConflict:
            # A request sent at the same time may have found other versions.
            held = await _made_before(context, own_key, job_id, is_repetition=is_repetition)
            if held is None:
                raise
    return await create(pinned_as(spec, held))


async def _made_before(
    context: ApiContext, own_key: str | None, job_id: str, *, is_repetition: bool
) -> JobRecord | None:
    job = await context.store.jobs.under(own_key) if own_key else None
    if job is None and is_repetition:
        job = job_id
    try:
        return None if job is None else await context.store.jobs.get(job)
    except JobNotFound:  # the first request got no further than its key
        return None
