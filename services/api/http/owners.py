"""Jobs of other owners do not exist for a caller: one check in front of every route that names a job."""

from __future__ import annotations

from fastapi import Request

from services.api.http.access import Caller
from services.api.http.context import ApiContext
from services.state.jobs import JobNotFound


async def own_job(request: Request) -> None:
    """Routes name a job as `id` or `job`. Raises JobNotFound, as if it did not exist."""
    caller: Caller = request.scope["caller"]
    job = request.path_params.get("id") or request.path_params.get("job")
    if job is None or caller.is_admin:
        return
    context: ApiContext = request.app.state.context
    if not caller.sees((await context.store.jobs.get(job)).owner):
        raise JobNotFound(job)
