"""Who plays the episodes of a job, in the records of processes and in words."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_core.spec import JobSpec
from services.state.fleet_records import WorkerKind

PLAYERS: Mapping[WorkerKind, str] = {"rollout": "rollout worker", "gateway": "gateway"}


def kind_of(spec: JobSpec) -> WorkerKind:
    return "gateway" if spec.is_of_agents else "rollout"
