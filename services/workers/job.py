"""All episodes of one job that this worker holds: leased up to a limit, each its own task, handed back on leaving.

Rule: an episode's task never raises (see `episode`), so no episode can end another; and every leased episode is
finished, lost to a fence, or handed back. What ends a lease is answered before the next lease is asked for: its repeat
would end that one. `loading` loads the parts of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from gspo_core.types import EpisodeKey
from services.episodes.policy import Drained, Interrupted
from services.process.telemetry import get_logger
from services.state.queue import Append, Fenced, Gap, LeasedEpisode
from services.state.refusals import Damaged, EpisodeErased
from services.workers.engines import JobEngines
from services.workers.episode import Episode
from services.workers.loading import LoadedJob
from services.workers.quarantine import Quarantine
from services.workers.setting import EpisodeSetting, EpisodeSpec

# How long an idle job waits before it asks for new episodes again; a finished episode asks at once.
LEASE_POLL_S = 0.1
# How often one that has no place asks whether it needs one.
LOOK_S = 0.5


class Episodes(Protocol):
    """The worker's side of the bus."""

    async def lease(self, job: str, worker: str, token: str, limit: int) -> list[LeasedEpisode]: ...

    async def append(self, job: str, token: str, appends: Sequence[Append]) -> None: ...

    async def restart(self, key: EpisodeKey, token: str, attempt: int, kept: Sequence[Append] = ()) -> None: ...

    async def hand_back(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None: ...

    async def interrupt(self, job: str, token: str, keys: Sequence[EpisodeKey]) -> None: ...

    async def num_queued(self, job: str) -> int: ...

    async def fail(self, key: EpisodeKey, token: str, reason: str) -> None: ...

    async def read_episode(self, key: EpisodeKey) -> list[bytes]: ...


class JobEpisodes:
    """Runs until ``setting.leaving`` is set and everything is finished or handed back."""

    def __init__(
        self,
        job: str,
        loaded: LoadedJob,
        setting: EpisodeSetting,
        engines: JobEngines,
        bus: Episodes,
        *,
        worker: str,
        limit: Callable[[], int],
        drain_s: float,
        tell: Callable[[Mapping[str, str | bool]], Awaitable[None]],
    ) -> None:
        self._job = job
        self._loaded = loaded
        self._setting = replace(setting, others_wait=self._others_wait)
        self._engines = engines
        self._bus = bus
        self._worker = worker
        self._limit = limit
        """How many episodes this job may hold at the moment."""
        self._tell = tell
        """Reports the health of its environments."""
        self._quarantines = [Quarantine(partial(self._tell_health, one.name)) for one in loaded.environments]
        self._queue_is_empty = False
        """As far as is known."""
        self._drain_s = drain_s
        self._held: set[EpisodeKey] = set()
        self._is_owed_leases = False
        """They were asked for, and the answer was not awaited: the next one holds them too."""
        self._turn = asyncio.Lock()
        """To begin leases, or to end one. If the reply to an ending is lost it is said again, and the token fences only
        other workers: were its episode leased here in between, the repeat would take it from the new lease."""
        self._wake = asyncio.Event()

    @property
    def num_episodes(self) -> int:
        return len(self._held)

    @property
    def capacity(self) -> int:
        """Episodes that find a place in their environment at once."""
        return self._loaded.capacity

    @property
    def priority(self) -> float:
        return self._loaded.spec.resources.priority

    @property
    def is_idle(self) -> bool:
        return self._queue_is_empty and not self._held

    def num_wanted(self, spare: int) -> int:
        """Places that it can use: all that it finds room for, ``spare`` more than it has where nothing waits, and no
        more than it has while no engine serves it."""
        if all(one.is_on for one in self._quarantines):
            return min(self.capacity, spare)  # only a few try it, however many wait
        if not self._engines.usable():
            return len(self._held)
        return min(self.capacity, len(self._held) + spare) if self._queue_is_empty else self.capacity

    @property
    def ill_environments(self) -> dict[str, str]:
        """Those in quarantine here, with the last error."""
        pairs = zip(self._loaded.environments, self._quarantines, strict=True)
        return {environment.name: one.error for environment, one in pairs if one.error is not None}

    async def _tell_health(self, environment: str, is_well: bool, error: str) -> None:
        get_logger().warning("environment", job=self._job, environment=environment, healthy=is_well, error=error)
        self._setting.counters.add("env/recovered" if is_well else "env/quarantined")
        await self._tell({"environment": environment, "healthy": is_well, "error": error})

    async def _others_wait(self) -> bool:
        if len(self._held) > self._limit():
            return True  # another job is owed a place
        return bool(await self._setting.retrier.try_once(self._bus.num_queued, self._job))

    async def run(self) -> None:
        """If cancelled, it hands nothing back: the lease is lost, or nothing waits for it any more."""
        try:
            async with asyncio.TaskGroup() as watchers:
                watching = watchers.create_task(self._engines.watch())
                try:
                    await self._play_until_drained()
                finally:
                    watching.cancel()
        except Exception:  # of a watching task, too: it ends the episodes, which are still ours
            await self._hand_back()
            raise
        await self._hand_back()

    async def _play_until_drained(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as episodes:
                episodes.create_task(self._begin_to_leave(limit))
                await self._lease_episodes(episodes)

    async def _lease_episodes(self, episodes: asyncio.TaskGroup) -> None:
        while not self._setting.leaving.is_set():
            self._wake.clear()
            num_free = self._num_free()
            if num_free > 0 and self._engines.has_room():
                self._is_owed_leases = True
                leases = await self._lease(num_free)
                self._is_owed_leases = False
                self._queue_is_empty = len(leases) < num_free
                for lease in leases:
                    self._held.add(lease.key)
                    episodes.create_task(self._play(lease), name=str(lease.key))
            is_shut_out = num_free <= 0 and self.is_idle
            if is_shut_out:  # it leases nothing, by which others learn what they have to play
                self._queue_is_empty = not await self._setting.retrier.try_once(self._bus.num_queued, self._job)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if is_shut_out else LEASE_POLL_S):
                    await self._wake.wait()

    def _num_free(self) -> int:
        # Episodes waiting for a quarantined environment take no place from those whose environment is well.
        limit, num_waiting = self._limit(), sum(one.num_waiting for one in self._quarantines)
        return limit - len(self._held) + min(num_waiting, limit)

    async def _lease(self, limit: int) -> list[LeasedEpisode]:
        setting = self._setting
        try:
            async with self._turn:
                return await setting.retrier.keep_trying(self._bus.lease, self._job, self._worker, setting.token, limit)
        except Fenced:
            return []  # the worker's beat notices too, and ends everything
        except Damaged:
            return []  # its trainer empties the queue; the worker's reaping counts and logs it, less often than this

    async def _play(self, lease: LeasedEpisode) -> None:
        loaded, setting = self._loaded, self._setting
        try:
            environment = loaded.environments[lease.environment]
            quarantine = self._quarantines[lease.environment]
            order = EpisodeSpec.from_spec(loaded.spec, environment, lease, loaded.context_tokens, quarantine)
            await Episode(setting, order).run()
        except Drained:
            return  # still held: handed back with the others
        except Interrupted:
            setting.counters.add("episodes/interrupted")
            await self._end_lease(partial(self._bus.interrupt, self._job, setting.token, [lease.key]))
        except Fenced as error:
            setting.counters.add("episodes/erased" if isinstance(error, EpisodeErased) else "episodes/fenced")
        except Damaged:  # of its group: the queue is emptied, and the group dispatched again
            setting.counters.add("jobs/damaged")
        except Gap:
            # The server lost acknowledged segments; a new lease says which it still has.
            setting.counters.add("episodes/rolled_back")
            await self._end_lease(partial(self._bus.hand_back, self._job, setting.token, [lease.key]))
        except Exception as error:
            # Only a defect of ours leads here. After three such leases the queue gives the episode up.
            setting.counters.add("episodes/broken")
            get_logger().exception("episode broken", episode=str(lease.key))
            reason = f"{type(error).__name__}: {error}"
            await self._end_lease(partial(self._bus.fail, lease.key, setting.token, reason))
        self._held.discard(lease.key)
        self._wake.set()

    async def _end_lease(self, call: Callable[[], Awaitable[None]]) -> None:
        async with self._turn:
            await self._setting.retrier.keep_trying(call)

    async def _begin_to_leave(self, limit: asyncio.Timeout) -> None:
        """From the wish on, also while Redis is away and a lease is not answered."""
        await self._setting.leaving.wait()
        limit.reschedule(asyncio.get_running_loop().time() + self._drain_s)
        self._wake.set()

    async def _hand_back(self) -> None:
        setting = self._setting
        if self._is_owed_leases:
            self._held |= {lease.key for lease in await self._lease(0)}
        keys = sorted(self._held)
        if not keys:
            return
        with contextlib.suppress(Fenced):  # the job, or its groups, are gone: nothing to hand back
            await setting.retrier.keep_trying(self._bus.hand_back, self._job, setting.token, keys)
            setting.counters.add("episodes/handed_back", len(keys))
            get_logger().info("handed back", job=self._job, num_episodes=len(keys))
        self._held.clear()
