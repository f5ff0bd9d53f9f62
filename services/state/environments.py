"""The environments of a job as rollout workers describe them, since the trainer runs no environment code.

The rule: the first description stands, because tasks are drawn from its numbers. It does not validate descriptions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from services.files.disk_space import write_when_there_is_room
from services.files.job_dir import JobsDir
from services.files.job_records import JobRecords
from services.state.functions import Functions
from services.state.jobs import JobNotFound
from services.state.keys import job_key, job_keys
from services.state.rebuild import encode_description
from services.state.refusals import Damaged, Missing


class EnvironmentDescriptions:
    """``jobs_dir``: the root of the jobs' directories, if this process writes there."""

    def __init__(self, functions: Functions, jobs_dir: JobsDir | None, *, waits_for_room: bool) -> None:
        self._functions = functions
        self._jobs_dir = jobs_dir
        self._to_disk = write_when_there_is_room if waits_for_room else asyncio.to_thread

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
        if self._jobs_dir is not None:
            await self._to_disk(JobRecords(self._jobs_dir.job(job)).write_environment, index, description)
        return description


def _description(text: bytes) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(text)
    return description
