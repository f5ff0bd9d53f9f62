"""The version table of a job: each published version with its epoch and step.

The rule: a version is a publish counter that is never handed out twice, even by a server that lost its memory, because
the job's directory knows the used numbers. A published version never changes. It holds manifests, not weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gspo_core.log.manifests import decode_row, encode_row
from gspo_core.log.records import RecordConflict, VersionRecord
from gspo_core.versions import WeightsManifest
from services.state.functions import Functions
from services.state.keys import job_key, job_keys
from services.state.refusals import Conflict

if TYPE_CHECKING:
    from services.files.job_records import SavedJobs

_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Version:
    """A row of the table."""

    version: int
    epoch: int
    step: int
    parent: int | None
    """The version whose weights this one was trained from or equals; None for the first."""


class VersionTable:
    """``saved``: the jobs' directories, if this process writes there."""

    def __init__(self, functions: Functions, saved: SavedJobs | None) -> None:
        self._functions = functions
        self._saved = saved
        self._asked: set[str] = set()
        """Owners whose directory was checked; since then the server's counter is above it."""

    async def next(self, job: str, token: str, *, at_least: int = 0) -> int:
        """A publish number never handed out before, from 0, at least ``at_least``. Raises Fenced."""
        if self._saved is not None and token not in self._asked:
            highest = await asyncio.to_thread(self._saved.of(job).highest_version)
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
        if self._saved is not None:
            # After the server, so a fenced trainer leaves no trace; before anyone is told.
            record = VersionRecord(manifest.version, manifest.step, text)
            try:
                await asyncio.to_thread(self._saved.of(job).write_version, record)
            except RecordConflict as error:
                raise Conflict(str(error)) from None

    async def current(self, job: str) -> WeightsManifest | None:
        text = await self._functions.call("current_version", job_keys(job))
        return None if text is None else decode_row(text)

    async def all(self, job: str) -> list[WeightsManifest]:
        """All published manifests, in order: as many as the run has steps, which takes long to decode in a long one."""
        texts = await self._functions.redis.hvals(job_key(job, "versions"))
        return sorted((decode_row(text) for text in texts), key=lambda manifest: manifest.version)

    async def manifests(self, job: str, numbers: Collection[int]) -> list[WeightsManifest]:
        """Those of ``numbers`` that are published, in the order of ``numbers``."""
        if not numbers:
            return []
        texts = await self._functions.redis.hmget(job_key(job, "versions"), [str(number) for number in numbers])
        return [decode_row(text) for text in texts if text is not None]

    async def newest(self, job: str, count: int, *, below: int | None = None) -> list[tuple[Version, WeightsManifest]]:
        """The newest versions, or the newest below one, the newest first: a job has as many as steps, and few are
        looked at."""
        names = await self._functions.redis.hkeys(job_key(job, "versions"))
        numbers = sorted((number for number in map(int, names) if below is None or number < below), reverse=True)
        manifests = await self.manifests(job, numbers[: count + 1])
        found = []
        for place, manifest in enumerate(manifests[:count]):
            before = manifests[place + 1] if place + 1 < len(manifests) else None
            if before is None or before.epoch == manifest.epoch:
                parent = None if before is None else before.version
            else:
                parent = await self._newest_of_step(job, manifest.step, numbers[place + 1 :])
            found.append((Version(manifest.version, manifest.epoch, manifest.step, parent), manifest))
        return found

    async def _newest_of_step(self, job: str, step: int, numbers: Sequence[int]) -> int | None:
        for begin in range(0, len(numbers), _AT_ONCE):
            for manifest in await self.manifests(job, numbers[begin : begin + _AT_ONCE]):
                if manifest.step == step:
                    return manifest.version
        return None

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
