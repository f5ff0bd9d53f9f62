"""All episodes of one job that this worker holds: leased up to a limit, each its own task, handed back on leaving.

Rule: an episode's task never raises (see `episode`), so no episode can end another; and every episode that was leased
is finished, lost to a fence, or handed back. What a job is made of is loaded elsewhere (`loading`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from gspo_core.types import EpisodeKey
from services.bus import Append, EpisodeLease, Fenced, Gap
from services.rollout.engines import JobEngines
from services.rollout.episode import Episode
from services.rollout.loading import LoadedJob
from services.rollout.policy import Drained
from services.rollout.setting import Order, Setting
from services.telemetry import get_logger

# How long an idle job waits before it asks for new episodes again; a finished episode asks at once.
LEASE_POLL_S = 0.1


class Episodes(Protocol):
    """The worker's side of the bus."""

    async def lease(self, job: str, worker: str, token: str, limit: int) -> list[EpisodeLease]: ...

    async def append(self, job: str, token: str, appends: Sequence[Append]) -> None: ...

    async def restart(self, key: EpisodeKey, token: str, attempt: int) -> None: ...

    async def hand_back(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None: ...

    async def fail(self, key: EpisodeKey, token: str, reason: str) -> None: ...

    async def read_episode(self, key: EpisodeKey) -> list[bytes]: ...


class JobRollout:
    """Runs until ``setting.leaving`` is set and everything is finished or handed back."""

    def __init__(
        self,
        job: str,
        loaded: LoadedJob,
        setting: Setting,
        engines: JobEngines,
        bus: Episodes,
        *,
        worker: str,
        limit: Callable[[], int],
        drain_s: float,
    ) -> None:
        self._job = job
        self._loaded = loaded
        self._setting = setting
        self._engines = engines
        self._bus = bus
        self._worker = worker
        self._limit = limit
        """How many episodes this job may hold at the moment."""
        self._drain_s = drain_s
        self._held: set[EpisodeKey] = set()
        self._wake = asyncio.Event()

    @property
    def num_episodes(self) -> int:
        return len(self._held)

    @property
    def capacity(self) -> int:
        """Episodes that find a place in their environment at once."""
        return self._loaded.capacity

    async def run(self) -> None:
        """Cancelled, it hands nothing back: then the lease is lost, or nobody waits for it any more."""
        async with asyncio.TaskGroup() as watchers:
            watching = watchers.create_task(self._engines.watch())
            waking = watchers.create_task(self._wake_on_leaving())
            try:
                await self._play_until_drained()
            except Exception:
                await self._hand_back()
                raise
            else:
                await self._hand_back()
            finally:
                watching.cancel()
                waking.cancel()

    async def _play_until_drained(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as episodes:
                await self._lease_episodes(episodes)
                limit.reschedule(asyncio.get_running_loop().time() + self._drain_s)

    async def _lease_episodes(self, episodes: asyncio.TaskGroup) -> None:
        while not self._setting.leaving.is_set():
            self._wake.clear()
            num_free = self._limit() - len(self._held)
            if num_free > 0 and self._engines.has_room():
                for lease in await self._lease(num_free):
                    self._held.add(lease.key)
                    episodes.create_task(self._play(lease), name=str(lease.key))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_POLL_S):
                    await self._wake.wait()

    async def _lease(self, limit: int) -> list[EpisodeLease]:
        setting = self._setting
        try:
            return await setting.patience.keep_trying(self._bus.lease, self._job, self._worker, setting.token, limit)
        except Fenced:
            return []  # the worker's beat learns of it too, and ends everything

    async def _play(self, lease: EpisodeLease) -> None:
        loaded, setting = self._loaded, self._setting
        try:
            environment = loaded.environments[lease.environment]
            order = Order.from_spec(loaded.spec, environment, lease, loaded.context_tokens)
            await Episode(setting, order).run()
        except Drained:
            return  # still held: handed back with the others
        except Fenced:
            setting.counters.add("episodes/fenced")
        except Gap:
            # The server lost what it had acknowledged; a new lease says what it still has.
            setting.counters.add("episodes/rolled_back")
            await setting.patience.keep_trying(self._bus.hand_back, self._job, setting.token, [lease.key])
        except Exception as error:
            # Only a defect of ours comes here. After three such leases the queue gives the episode up.
            setting.counters.add("episodes/broken")
            get_logger().exception("episode broken", episode=str(lease.key))
            reason = f"{type(error).__name__}: {error}"
            await setting.patience.keep_trying(self._bus.fail, lease.key, setting.token, reason)
        self._held.discard(lease.key)
        self._wake.set()

    async def _wake_on_leaving(self) -> None:
        await self._setting.leaving.wait()
        self._wake.set()

    async def _hand_back(self) -> None:
        setting, keys = self._setting, sorted(self._held)
        if not keys:
            return
        with contextlib.suppress(Fenced):  # the job, or its groups, are gone: nothing to give
            await setting.patience.keep_trying(self._bus.hand_back, self._job, setting.token, keys)
            setting.counters.add("episodes/handed_back", len(keys))
            get_logger().info("handed back", job=self._job, num_episodes=len(keys))
        self._held.clear()
