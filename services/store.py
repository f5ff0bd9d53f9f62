"""The control plane's state: jobs, trainer leases, events, versions, engines, workers, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from gspo_core.types import WeightsManifest
from services.bus import Fenced
from services.jobs import (
    Claim,
    DesiredState,
    IllegalTransition,
    Job,
    JobConflict,
    JobNotFound,
    JobStatus,
    StatusReason,
)

__all__ = [
    "Claim",
    "DesiredState",
    "Event",
    "Fenced",
    "IllegalTransition",
    "InvalidCursor",
    "Job",
    "JobConflict",
    "JobNotFound",
    "JobStatus",
    "StatusReason",
    "Store",
]


class InvalidCursor(ValueError):
    """A position that is no id of the list or stream it is used on."""


@dataclass(frozen=True, slots=True)
class Event:
    id: str
    """The stream id; resume after it. An event of type ``gap`` says that events before it were trimmed."""
    type: str
    created_at: str
    data: dict[str, Any]


class Store:
    def __init__(self, redis: Any, *, lease_s: float = 30.0) -> None:
        raise NotImplementedError

    async def load_functions(self) -> None:
        raise NotImplementedError

    async def create_job(
        self, spec: BaseModel | str, *, idempotency_key: str | None = None, job_id: str | None = None
    ) -> Job:
        raise NotImplementedError

    async def get_job(self, job: str) -> Job:
        """Raises JobNotFound."""
        raise NotImplementedError

    async def list_jobs(
        self, limit: int = 20, after: str | None = None, *, before: str | None = None, order: str = "asc"
    ) -> list[Job]:
        raise NotImplementedError

    async def running_jobs(self) -> list[str]:
        raise NotImplementedError

    async def set_status(
        self, job: str, status: JobStatus | str, *, token: str | None = None, reason: StatusReason | None = None
    ) -> Job:
        """Raises IllegalTransition, Fenced. The event ``job.status`` is written in the same atomic call."""
        raise NotImplementedError

    async def set_desired_state(self, job: str, desired: DesiredState | str) -> Job:
        raise NotImplementedError

    async def update_progress(self, job: str, token: str, step: int, version: int) -> None:
        raise NotImplementedError

    async def claim_job(self, trainer: str) -> Claim | None:
        raise NotImplementedError

    async def beat_trainer(self, job: str, token: str) -> None:
        raise NotImplementedError

    async def release_job(self, job: str, token: str) -> None:
        raise NotImplementedError

    async def raise_epoch(self, job: str, token: str, epoch: int) -> None:
        raise NotImplementedError

    async def add_event(self, job: str, type: str, data: Mapping[str, Any]) -> str:
        raise NotImplementedError

    async def read_events(self, job: str, after: str = "0", *, count: int = 100, block_ms: int = 0) -> list[Event]:
        """block_ms 0: do not wait."""
        raise NotImplementedError

    async def describe_environment(self, job: str, index: int, description: Mapping[str, Any]) -> dict[str, Any]:
        """The first description holds; returns the one that holds."""
        raise NotImplementedError

    async def environment_description(self, job: str, index: int) -> dict[str, Any] | None:
        raise NotImplementedError

    async def next_version(self, job: str, token: str, *, at_least: int = 0) -> int:
        raise NotImplementedError

    async def publish_version(self, job: str, token: str, manifest: WeightsManifest) -> None:
        raise NotImplementedError

    async def current_version(self, job: str) -> WeightsManifest | None:
        raise NotImplementedError

    async def versions(self, job: str) -> list[WeightsManifest]:
        raise NotImplementedError

    async def register_engine(self, record: Mapping[str, Any]) -> None:
        """``record["id"]`` names the engine."""
        raise NotImplementedError

    async def engines(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def bind_engine(self, job: str, token: str, engine_id: str) -> bool:
        raise NotImplementedError

    async def unbind_engine(self, job: str, token: str, engine_id: str) -> None:
        raise NotImplementedError

    async def register_worker(self, record: Mapping[str, Any]) -> None:
        """``record["id"]`` names the worker."""
        raise NotImplementedError

    async def workers(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    async def add_metrics(self, job: str, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    async def read_metrics(self, job: str, from_step: int = 0) -> list[dict[str, Any]]:
        """One dict per step: ``{"step": n, name: value, ...}``."""
        raise NotImplementedError
