"""The queue between trainer and workers: groups dispatched, episodes leased, segments appended, groups committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo_core.types import EpisodeKey, Split


class Fenced(Exception):
    """The caller lost its lease: nothing was written; it must drop its work."""


class Gap(Exception):
    """The caller is ahead of the server (which was rolled back): nothing was written; abandon and lease again."""


@dataclass(frozen=True, slots=True)
class EpisodeLease:
    key: EpisodeKey
    attempt: int
    num_segments: int
    split: Split
    task_index: int
    environment: int
    group_size: int


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    group: int
    split: Split
    task_index: int
    environment: int
    size: int


@dataclass(frozen=True, slots=True)
class Append:
    key: EpisodeKey
    attempt: int
    index: int
    payload: bytes
    final: bool


class Bus:
    def __init__(self, redis: Any, *, lease_s: float = 30.0) -> None:
        raise NotImplementedError

    async def load_functions(self) -> None:
        raise NotImplementedError

    # trainer side
    async def dispatch(
        self, job: str, token: str, group: int, *, size: int, split: Split, task_index: int, environment: int = 0
    ) -> bool:
        raise NotImplementedError

    async def read_segments(
        self, job: str, after: str = "0", *, count: int = 256, block_ms: int = 200
    ) -> list[tuple[str, bytes]]:
        raise NotImplementedError

    async def ready_groups(self, job: str) -> list[ReadyGroup]:
        raise NotImplementedError

    async def commit(self, job: str, token: str, step: int, groups: Sequence[int], *, reason: str = "trained") -> None:
        raise NotImplementedError

    async def counters(self, job: str) -> dict[str, int]:
        raise NotImplementedError

    # worker side
    async def join(self, worker: str) -> str:
        raise NotImplementedError

    async def beat(self, worker: str, token: str) -> None:
        raise NotImplementedError

    async def leave(self, worker: str, token: str) -> None:
        raise NotImplementedError

    async def lease(self, job: str, worker: str, token: str, limit: int) -> list[EpisodeLease]:
        raise NotImplementedError

    async def append(self, job: str, token: str, appends: Sequence[Append]) -> None:
        raise NotImplementedError

    async def restart(self, key: EpisodeKey, token: str, attempt: int) -> None:
        raise NotImplementedError

    async def hand_back(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None:
        raise NotImplementedError

    async def read_episode(self, key: EpisodeKey) -> list[bytes]:
        raise NotImplementedError

    async def reap(self, job: str) -> int:
        """Requeue the episodes of workers whose beat stands still; returns how many. Call it every lease_s / 5."""
        raise NotImplementedError
