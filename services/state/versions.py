"""The version table of a job: each published version with its epoch and step.

The rule: a version is a publish counter that is never handed out twice, even by a server that lost its memory, because
the job's directory knows the used numbers. A published version never changes. It holds manifests, not weights.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gspo_core.log.manifests import decode_row, encode_row
from gspo_core.types import WeightsManifest
from services.files.job_dir import JobsDir
from services.files.job_records import JobRecords, RecordConflict, VersionRecord
from services.state.functions import Functions
from services.state.keys import job_key, job_keys
from services.state.refusals import Conflict


@dataclass(frozen=True, slots=True)
class Version:
    """A row of the table."""

    version: int
    epoch: int
    step: int
    parent: int | None
    """The version whose weights this one was trained from or equals; None for the first."""


class VersionTable:
    """``jobs_dir``: the root of the jobs' directories, if this process writes there."""

    def __init__(self, functions: Functions, jobs_dir: JobsDir | None) -> None:
        self._functions = functions
        self._jobs_dir = jobs_dir
        self._asked: set[str] = set()
        """Owners whose directory was checked; since then the server's counter is above it."""

    async def next(self, job: str, token: str, *, at_least: int = 0) -> int:
        """A publish number never handed out before, from 0, at least ``at_least``. Raises Fenced."""
        if self._jobs_dir is not None and token not in self._asked:
            highest = await asyncio.to_thread(JobRecords(self._jobs_dir.job(job)).highest_version)
            at_least = max(at_least, highest + 1)
            self._asked.add(token)
        return int(await self._functions.call("next_version", job_keys(job), token, at_least))

    async def publish(self, job: str, token: str, manifest: WeightsManifest) -> None:
        """Make ``manifest`` the current version. Raises Fenced; Conflict for a number below the current one, or one
        that names other weights."""
        if manifest.job != job:
            raise ValueError(f"the manifest of job {manifest.job} does not belong to job {job}")
        text = encode_row(manifest)
        await self._functions.call("publish_version", job_keys(job), token, manifest.version, text)
        if self._jobs_dir is not None:
            # After the server, so a fenced trainer leaves no trace; before anyone is told.
            record = VersionRecord(manifest.version, manifest.step, text)
            try:
                await asyncio.to_thread(JobRecords(self._jobs_dir.job(job)).write_version, record)
            except RecordConflict as error:
                raise Conflict(str(error)) from None

    async def current(self, job: str) -> WeightsManifest | None:
        text = await self._functions.call("current_version", job_keys(job))
        return None if text is None else decode_row(text)

    async def all(self, job: str) -> list[WeightsManifest]:
        """All published manifests, in order."""
        texts = await self._functions.redis.hvals(job_key(job, "versions"))
        return sorted((decode_row(text) for text in texts), key=lambda manifest: manifest.version)

    async def table(self, job: str) -> list[Version]:
        """Epoch, step and parent of all published versions, in order."""
        rows: list[Version] = []
        for manifest in await self.all(job):
            parent = _parent(rows, manifest)
            rows.append(Version(manifest.version, manifest.epoch, manifest.step, parent))
        return rows


def _parent(earlier: list[Version], manifest: WeightsManifest) -> int | None:
    """The previous version of the same epoch; for an epoch's first version, the one the epoch forked from."""
    if earlier and earlier[-1].epoch == manifest.epoch:
        return earlier[-1].version
    same = [one.version for one in earlier if one.step == manifest.step]
    return same[-1] if same else None
