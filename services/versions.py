"""The version table of a job: what was published, by which epoch, at which step.

The rule: a version is a publish counter that is never handed out twice, and a published one never changes.
It holds manifests, not weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from gspo_core.types import WeightFile, WeightsManifest
from services.functions import Functions
from services.keys import job_key, job_keys


class VersionTable:
    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    async def next(self, job: str, token: str, at_least: int) -> int:
        return int(await self._functions.call("next_version", job_keys(job), token, at_least))

    async def publish(self, job: str, token: str, manifest: WeightsManifest) -> None:
        if manifest.job != job:
            raise ValueError(f"the manifest of job {manifest.job} is no version of job {job}")
        text = json.dumps(asdict(manifest), sort_keys=True, separators=(",", ":"))
        await self._functions.call("publish_version", job_keys(job), token, manifest.version, text)

    async def current(self, job: str) -> WeightsManifest | None:
        text = await self._functions.call("current_version", job_keys(job))
        return None if text is None else _manifest(text)

    async def all(self, job: str) -> list[WeightsManifest]:
        texts = await self._functions.redis.hvals(job_key(job, "versions"))
        return sorted((_manifest(text) for text in texts), key=lambda manifest: manifest.version)


def _manifest(text: bytes) -> WeightsManifest:
    data = json.loads(text)
    return WeightsManifest(**{**data, "files": tuple(WeightFile(**file) for file in data["files"])})
