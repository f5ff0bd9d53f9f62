"""Changing a job while it runs. `gspo_core.live_settings` says what may change, and why the rest may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Body, Response
from pydantic import JsonValue

from gspo_core.problems import Problem
from services.api.http import audit
from services.api.http.context import ContextOf
from services.api.http.errors import documented, invalid
from services.api.http.etags import IfMatch, require_match, tagged
from services.api.http.routers import v1_router
from services.api.http.stored_specs import spec_of
from services.api.views.store_views import JobView, job_view
from services.state.refusals import Conflict

router = v1_router("jobs", "/jobs")

Changes = Annotated[
    dict[str, JsonValue],
    Body(
        description="The part of a job's specification to change, with its new values.",
        examples=[{"optimizer": {"lr": 5e-7}, "steps": 400}],
    ),
]


@router.patch("/{id}", response_model=JobView, responses=documented(409, 412, 413, 415))
async def change_job(id: str, changes: Changes, context: ContextOf, if_match: IfMatch = None) -> Response:
    """Change live settings. They hold from the next step on, whatever happens to the job; the event
    `settings.applied` names that step. Repeating a change changes nothing. With `If-Match` the change is refused if
    another one came first."""
    from gspo_core.live_settings import ChangeRefused, live_values, merged, tuned  # few jobs are changed

    while True:
        job = await context.store.jobs.get(id)
        try:
            wanted = live_values(changes)
            values = merged(spec_of(job), job.settings, wanted)
            changed = tuned(spec_of(job), values)
        except ChangeRefused as refusal:
            raise invalid(refusal.problems) from None
        if values == job.settings and not job.status.is_terminal:
            return tagged(job_view(job), job.settings_version)
        # Settings that hold already were set by an earlier try of this request, or are as it wants them.
        require_match(if_match, job.settings_version)
        if changed.steps < job.step:
            raise invalid([_too_few_steps(changed.steps, job.step)])
        try:
            before = {key: job.settings.get(key, _submitted(job.spec_data, key)) for key in wanted}
            job = await context.store.jobs.change_settings(id, job.settings_version, values, wanted)
            audit.changed("job", id, before, wanted)
            return tagged(job_view(job), job.settings_version)
        except Conflict:  # another change was faster: look again
            continue


def _submitted(spec: Mapping[str, Any], key: str) -> Any:
    """The value of ``objective.name`` and the like; None where its default holds."""
    value: Any = spec
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _too_few_steps(wanted: int, taken: int) -> Problem:
    message = f"steps: {wanted} is fewer than the {taken} already taken; to end the job, cancel it"
    return Problem("validation_failed", ("steps",), message)
