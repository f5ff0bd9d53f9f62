"""The calls of the client by which trained steps are trained again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar, Unpack
from urllib.parse import quote

from gspo_core.api_answers import Replay, ReplayDetail, ReplayPlan
from gspo_core.client_leases import RequestParts
from gspo_core.json_value import JSON

T = TypeVar("T")


class ReplayCalls(Protocol):
    """Part of ``gspo_core.client.Client``."""

    def _ask(self, shape: type[T], method: str, path: str, **request: Unpack[RequestParts]) -> T: ...

    def _pages(self, item: type[T], path: str, params: dict[str, str]) -> Iterator[T]: ...

    def _remove(self, path: str, gone: str) -> None: ...

    def begin_replay(
        self,
        job_id: str,
        first: int,
        last: int | None = None,
        *,
        changes: Mapping[str, JSON] | None = None,
        without: Sequence[str] = (),
        single: str | None = None,
        influence: bool = False,
    ) -> Replay:
        """Train steps of a job again, as they were or with ``changes`` by key, ``without`` groups, episodes or parts of
        the reward. Ask for the replay until it is ``done``; the same question is the same replay."""
        body = _question(first, last, changes, without, single, influence)
        return self._ask(Replay, "POST", _path(job_id), json=body)

    def plan_replay(
        self,
        job_id: str,
        first: int,
        last: int | None = None,
        *,
        changes: Mapping[str, JSON] | None = None,
        without: Sequence[str] = (),
        influence: bool = False,
    ) -> ReplayPlan:
        """Say what a replay would take; begin nothing."""
        body = _question(first, last, changes, without, None, influence)
        return self._ask(ReplayPlan, "POST", _path(job_id), params={"dry_run": "true"}, json=body)

    def replay(self, job_id: str, replay_id: str) -> ReplayDetail:
        """One replay, with its answer once it is ``done``."""
        return self._ask(ReplayDetail, "GET", f"{_path(job_id)}/{quote(replay_id, safe='')}")

    def replays(self, job_id: str) -> Iterator[Replay]:
        """What was asked of a job's steps, the newest first."""
        yield from self._pages(Replay, _path(job_id), {})

    def remove_replay(self, job_id: str, replay_id: str) -> None:
        """Stop and remove it. Gone already is as good."""
        self._remove(f"{_path(job_id)}/{quote(replay_id, safe='')}", "replay_not_found")


def _question(
    first: int,
    last: int | None,
    changes: Mapping[str, JSON] | None,
    without: Sequence[str],
    single: str | None,
    influence: bool,
) -> dict[str, JSON]:
    return {
        "first": first,
        "last": last,
        "set": dict(changes or {}),
        "without": list(without),
        "single": single,
        "influence": influence,
    }


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}/replays"
