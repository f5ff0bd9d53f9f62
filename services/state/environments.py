"""The environments of a job as rollout workers describe them, since the trainer runs no environment code.

The rule: the first description stands, because tasks are drawn from its numbers. It does not validate descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from services.state.functions import Functions
from services.state.jobs import JobNotFound
from services.state.keys import job_key, job_keys
from services.state.refusals import Damaged, Missing

if TYPE_CHECKING:
    from services.files.job_records import SavedJobs


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
