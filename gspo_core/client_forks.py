"""The calls of the client for jobs that begin with the past of another: forks, and jobs on recorded episodes.

Rule: ``plan_`` calls say what a job would take and create nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, Unpack
from urllib.parse import quote

from gspo_core.api_answers import ForkPlan, Job, RetrainPlan
from gspo_core.client_leases import RequestParts
from gspo_core.json_value import JSON

T = TypeVar("T")


class ForkCalls(Protocol):
    """Part of ``gspo_core.client.Client``."""

    def _ask(self, shape: type[T], method: str, path: str, **request: Unpack[RequestParts]) -> T: ...

    def fork(
        self,
        job_id: str,
        step: int | None = None,
        *,
        changes: Mapping[str, JSON] | None = None,
        same_batches: bool = False,
        last: int | None = None,
        without: Sequence[str] = (),
        rewards: Mapping[str, float] | None = None,
        name: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Begin a new job after ``step`` steps of another (None: its newest), with ``changes`` by key. With
        ``same_batches`` it is first trained on what its parent was trained on, up to the step ``last`` (None: as far as
        it is kept), ``without`` groups (``349``), episodes (``349/2``) or parts of the reward, and with ``rewards`` in
        place of those of episodes."""
        body = _fork(step, changes, same_batches, last, without, rewards) | {"name": name}
        return self._ask(Job, "POST", _path(job_id, "fork"), json=body, headers=_once(idempotency_key))

    def plan_fork(
        self,
        job_id: str,
        step: int | None = None,
        *,
        changes: Mapping[str, JSON] | None = None,
        same_batches: bool = False,
        last: int | None = None,
        without: Sequence[str] = (),
        rewards: Mapping[str, float] | None = None,
    ) -> ForkPlan:
        """Say what a fork would take; create nothing."""
        body = _fork(step, changes, same_batches, last, without, rewards)
        return self._ask(ForkPlan, "POST", _path(job_id, "fork"), params={"dry_run": "true"}, json=body)

    def retrain(
        self,
        job_id: str,
        *,
        first: int | None = None,
        last: int | None = None,
        rewards: Mapping[str, float] | None = None,
        traces: Sequence[Mapping[str, float]] = (),
        changes: Mapping[str, JSON] | None = None,
        name: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Train a new job on the recorded episodes of another: the batches of its steps from ``first`` to ``last``
        (None: as far as they are kept), with ``rewards`` in place of those of episodes (``349/2``); or on groups of
        ``traces``, each with its reward."""
        body = _retrain(first, last, rewards, traces, changes, name)
        return self._ask(Job, "POST", _path(job_id, "retrain"), json=body, headers=_once(idempotency_key))

    def plan_retrain(
        self,
        job_id: str,
        *,
        first: int | None = None,
        last: int | None = None,
        rewards: Mapping[str, float] | None = None,
        traces: Sequence[Mapping[str, float]] = (),
        changes: Mapping[str, JSON] | None = None,
    ) -> RetrainPlan:
        """Say what such a job would be trained on; create nothing."""
        body = _retrain(first, last, rewards, traces, changes, None)
        return self._ask(RetrainPlan, "POST", _path(job_id, "retrain"), params={"dry_run": "true"}, json=body)


def _path(job_id: str, rest: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}/{rest}"


def _once(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key or uuid.uuid4().hex}


def _fork(
    step: int | None,
    changes: Mapping[str, JSON] | None,
    same_batches: bool,
    last: int | None,
    without: Sequence[str],
    rewards: Mapping[str, float] | None,
) -> dict[str, JSON]:
    """Leaves out options that were not given: a service of an older release refuses those it does not know."""
    told: dict[str, JSON] = {"last": last} if last is not None else {}
    told |= {"without": list(without)} if without else {}
    told |= {"rewards": dict(rewards)} if rewards else {}
    return {"step": step, "set": dict(changes or {}), "same_batches": same_batches, **told}


def _retrain(
    first: int | None,
    last: int | None,
    rewards: Mapping[str, float] | None,
    traces: Sequence[Mapping[str, float]],
    changes: Mapping[str, JSON] | None,
    name: str | None,
) -> dict[str, JSON]:
    return {
        "first": first,
        "last": last,
        "rewards": dict(rewards or {}),
        "traces": [dict(group) for group in traces],
        "set": dict(changes or {}),
        "name": name,
    }
