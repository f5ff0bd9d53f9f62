"""The store in memory: jobs, and what they leave behind while they run; ``services.state.store.Store`` says what it
means."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gspo_core.types import WeightsManifest
from services.state.events import JobEvent
from services.state.fleet import Everyone
from services.state.fleet_records import EngineRecord, EngineReport, ProcessRecord, TrainerRecord, WorkerRecord
from services.state.jobs import InvalidCursor
from services.state.refusals import Conflict, Fenced, Missing
from services.state.versions import Version
from tests.apparatus.twin.events import add_event, events_after, trim
from tests.apparatus.twin.jobs import TwinJobs

R = TypeVar("R", bound=ProcessRecord)
_POSITION = re.compile(r"\d{1,16}(-\d{1,16})?")


class TwinStore(TwinJobs):
    """Has the methods of ``Store``, with the same meaning; there are no directories."""

    # Events

    async def add_event(self, job: str, type: str, data: Mapping[str, Any], *, token: str | None = None) -> str:
        found = self._find(job)
        if token and not self._world.owns(job, token):
            raise Fenced(f"event {type}")
        return await add_event(self._world, found, type, data, self._now())

    async def read_events(self, job: str, after: str = "0", *, count: int = 100, block_ms: int = 0) -> list[JobEvent]:
        if not _POSITION.fullmatch(after):
            raise InvalidCursor(f"an event id reads MILLISECONDS-NUMBER, not {after!r}")
        found = self._world.jobs.get(job)
        if found is None:
            return []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(block_ms / 1000), self._world.news:
                while not events_after(found, after, count):
                    await self._world.news.wait()
        return events_after(found, after, count)

    async def newest_event(self, job: str) -> str | None:
        found = self._world.jobs.get(job)
        return found.events[-1].id if found is not None and found.events else None

    async def trim_events(self, job: str, keep: int) -> None:
        trim(self._find(job), keep)

    # Environments

    async def describe_environment(self, job: str, index: int, description: Mapping[str, Any]) -> dict[str, Any]:
        text = json.dumps(dict(description), sort_keys=True, allow_nan=False)
        held: dict[str, Any] = json.loads(self._find(job).environments.setdefault(index, text))
        return held

    async def environment_description(self, job: str, index: int) -> dict[str, Any] | None:
        found = self._world.jobs.get(job)
        text = None if found is None else found.environments.get(index)
        return None if text is None else json.loads(text)

    # Versions

    async def next_version(self, job: str, token: str, *, at_least: int = 0) -> int:
        found = self._owned(job, token, "next version")
        version = max(found.next_version, at_least)
        found.next_version = version + 1
        return version

    async def publish_version(self, job: str, token: str, manifest: WeightsManifest) -> None:
        if manifest.job != job:
            raise ValueError(f"the manifest of job {manifest.job} is no version of job {job}")
        found = self._owned(job, token, f"version {manifest.version}")
        published = found.versions.get(manifest.version)
        if published == manifest:
            return
        if published is not None or manifest.version < max(found.versions, default=0):
            raise Conflict(f"version {manifest.version}")
        found.versions[manifest.version] = manifest
        found.policy_version = manifest.version
        found.next_version = max(found.next_version, manifest.version + 1)

    async def current_version(self, job: str) -> WeightsManifest | None:
        manifests = await self.versions(job)
        return manifests[-1] if manifests else None

    async def versions(self, job: str) -> list[WeightsManifest]:
        found = self._world.jobs.get(job)
        return [] if found is None else [found.versions[version] for version in sorted(found.versions)]

    async def version_table(self, job: str) -> list[Version]:
        rows: list[Version] = []
        for one in await self.versions(job):
            if rows and rows[-1].epoch == one.epoch:
                parent: int | None = rows[-1].version
            else:
                parent = max((row.version for row in rows if row.step == one.step), default=None)
            rows.append(Version(one.version, one.epoch, one.step, parent))
        return rows

    # Engines, trainers and workers

    async def register_engine(self, record: EngineRecord) -> None:
        _enlist(self._world.engines, record)

    async def remove_engine(self, engine_id: str) -> None:
        self._world.engines.pop(engine_id, None)
        self._world.bindings.pop(engine_id, None)
        self._world.engine_states.pop(engine_id, None)
        self._world.engine_drains.discard(engine_id)

    async def drain_engine(self, engine_id: str, wanted: bool = True) -> None:
        (self._world.engine_drains.add if wanted else self._world.engine_drains.discard)(engine_id)

    async def engines(self) -> list[EngineRecord]:
        jobs = {engine: job for engine, (job, *_) in self._world.bindings.items() if not self._is_void(job)}
        return [
            msgspec.structs.replace(
                record,
                job=jobs.get(name),
                draining=name in self._world.engine_drains,
                report=self._world.engine_states.get(name) if name in jobs else None,
            )
            for name, record in sorted(self._world.engines.items())
        ]

    async def bind_engine(self, job: str, token: str, engine_id: str) -> bool:
        found = self._owned(job, token, f"engine for job {job}")
        if engine_id not in self._world.engines:
            raise Missing(f"engine {engine_id}")
        wanted, held = (job, found.epoch, token), self._world.bindings.get(engine_id)
        if held not in (None, wanted) and not self._may_be_replaced(held, wanted):
            return False
        if held != wanted:
            self._world.engine_states.pop(engine_id, None)
        self._world.bindings[engine_id] = wanted
        return True

    def _may_be_replaced(self, held: tuple[str, int, str] | None, wanted: tuple[str, int, str]) -> bool:
        """Whether the binding is of an earlier owner of the same job, or void."""
        assert held is not None
        return held[1] < wanted[1] if held[0] == wanted[0] else self._is_void(held[0])

    def _is_void(self, job: str) -> bool:
        bound = self._world.jobs.get(job)
        return bound is None or bound.finished_at is not None or not bound.trainer

    async def mark_engine(self, job: str, token: str, engine_id: str, report: EngineReport) -> bool:
        if not self._is_bound_to(job, token, engine_id):
            return False
        self._world.engine_states[engine_id] = EngineReport.from_json(report.to_json())
        return True

    async def unbind_engine(self, job: str, token: str, engine_id: str) -> None:
        if self._is_bound_to(job, token, engine_id):
            del self._world.bindings[engine_id]
            self._world.engine_states.pop(engine_id, None)

    def _is_bound_to(self, job: str, token: str, engine_id: str) -> bool:
        held = self._world.bindings.get(engine_id)
        return held is not None and (held[0], held[2]) == (job, token)

    async def register_trainer(self, record: TrainerRecord) -> None:
        _enlist(self._world.trainers, record)

    async def remove_trainer(self, trainer: str) -> None:
        self._world.trainers.pop(trainer, None)

    async def processes(self) -> Everyone:
        return Everyone(await self.trainers(), await self.workers(), await self.engines())

    async def trainers(self) -> list[TrainerRecord]:
        return [record for _, record in sorted(self._world.trainers.items())]

    async def register_worker(self, record: WorkerRecord) -> None:
        _enlist(self._world.workers, record)

    async def remove_worker(self, worker: str) -> None:
        self._world.workers.pop(worker, None)

    async def workers(self) -> list[WorkerRecord]:
        return [record for _, record in sorted(self._world.workers.items())]

    # Metrics

    async def add_metrics(self, job: str, step: int, metrics: Mapping[str, float], *, token: str | None = None) -> None:
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} of step {step} is not a finite number: {value}")
        found = self._find(job)
        if token and not self._world.owns(job, token):
            raise Fenced(f"metrics of step {step}")
        known = found.metrics.setdefault(step, {})
        known.update({name: float(value) for name, value in metrics.items()})

    async def read_metrics(self, job: str, from_step: int = 0) -> list[dict[str, Any]]:
        found = self._world.jobs.get(job)
        steps = sorted(step for step in found.metrics if step >= from_step) if found else []
        return [{"step": step, **dict(sorted(found.metrics[step].items()))} for step in steps] if found else []


def _enlist(known: dict[str, R], record: R) -> None:
    before = known.get(record.id)
    plain = type(record).from_json(record.to_json())
    known[record.id] = msgspec.structs.replace(plain, beats=(before.beats if before else 0) + 1)
