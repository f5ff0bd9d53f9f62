"""The specification of a job as it was accepted, perhaps by another release than this one.

Rule: a specification that this release cannot read fails only the answers that need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from gspo_core.spec import JobSpec
from services.api.http.errors import RequestRefused
from services.state.jobs import JobRecord


def spec_of(job: JobRecord) -> JobSpec:
    """Raises RequestRefused 422."""
    found = readable_spec(job)
    if found is None:
        message = f"the specification of {job.id} comes from another release, which this one cannot read"
        raise RequestRefused(422, "validation_failed", message)
    return found


def readable_spec(job: JobRecord) -> JobSpec | None:
    """None if it is of another release."""
    try:
        return JobSpec.model_validate(job.spec_data)
    except ValidationError:
        return None


def has_model_in(job: JobRecord, directory: Path) -> bool:
    """Whether its model lies in ``directory``, which is resolved, wherever links lead. It blocks."""
    try:
        return Path(str(job.spec_data.get("model"))).resolve().is_relative_to(directory)
    except (OSError, RuntimeError, ValueError):  # links in a circle, or no name of a file
        return False


def one_with_model_in(directory: Path, jobs: Iterable[JobRecord]) -> JobRecord | None:
    """It blocks."""
    resolved = directory.resolve()
    return next((job for job in jobs if has_model_in(job, resolved)), None)


def is_of_agents(job: JobRecord) -> bool:
    """Whether agents play its episodes, whatever release wrote it."""
    return any(entry.get("agent") is not None for entry in job.spec_data.get("environments", ()))
