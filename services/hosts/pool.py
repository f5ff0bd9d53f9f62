"""The processes of one environment and the sessions in them: capacity, placement, recycling, and reviving the host.

Rule: a session waits for its seat, first come first served, and is never refused. A process that died, or that holds
something that cannot be stopped, is never handed out again. The sessions of a dead process decide their own fate
(`session`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from gspo_core.environment_contract import EnvironmentFailed, InvalidEnvironment
from services.hosts.process import Cause, Death, HostProcess
from services.hosts.server import BootFailed, HostKilled, HostOrder, RunningHost
from services.hosts.wire import HostDescription
from services.process.telemetry import get_logger

if TYPE_CHECKING:
    from services.hosts.remote import RemoteHost, RemoteProcess

# Sessions are spread, not packed, until so many processes run.
NUM_SPREAD = os.cpu_count() or 1
BOOT_RETRY_S = (0.0, 0.5, 2.0)

Host: TypeAlias = "RunningHost | RemoteHost"
Process: TypeAlias = "HostProcess | RemoteProcess"
Boot: TypeAlias = Callable[[HostOrder], Awaitable[Host]]
"""Starts a host, beside us or in a service."""


@dataclass(eq=False)
class Seat:
    """A session's place in a process."""

    process: Process
    session: int
    is_alone: bool
    """No other session ever sits in this process."""


class HostPool:
    """``open`` makes one; ``close`` ends every process of it."""

    def __init__(self, order: HostOrder, server: Host, count: Callable[[str], None], boot: Boot) -> None:
        self._order = order
        self._boot = boot
        self._server = server
        self._count = count
        self.description: HostDescription = server.description
        self._processes: list[Process] = []
        self._next_session = 0
        self._limit = server.description.sessions_per_process * server.description.max_processes
        self._surplus = 0
        """Places still to be taken away."""
        self._free = asyncio.Semaphore(self._limit)
        self._placing = asyncio.Lock()
        self._is_closed = False
        self.num_seated = 0

    @classmethod
    async def open(
        cls, order: HostOrder, count: Callable[[str], None] = lambda name: None, boot: Boot = RunningHost.boot
    ) -> HostPool:
        """Raises ``InvalidEnvironment`` with the reason."""
        reason = ""
        for wait_s in BOOT_RETRY_S:
            await asyncio.sleep(wait_s)
            try:
                return cls(order, await boot(order), count, boot)
            except HostKilled as error:  # which says nothing of the environment, unless it is always so
                reason = str(error)
                count("host/rebooted")
            except BootFailed as error:
                raise InvalidEnvironment(str(error)) from error
        raise InvalidEnvironment(reason)

    @property
    def capacity(self) -> int:
        """How many sessions it holds at once."""
        return self._limit

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    @property
    def server_pid(self) -> int:
        return self._server.pid

    @property
    def pids(self) -> list[int]:
        """The processes that hold sessions."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def seat(self, *, alone: bool = False) -> Seat:
        """Waits for a place. ``alone``: in a process of its own."""
        await self._free.acquire()
        while self._surplus:
            self._surplus -= 1
            await self._free.acquire()
        self.num_seated += 1
        try:
            async with self._placing:  # wait for a fork under way: the next session may share its process
                process = (None if alone else self._pick()) or await self._fork()
        except BaseException:
            self._give_back()
            raise
        is_alone = alone or self.description.sessions_per_process == 1
        process.is_retired |= is_alone
        self._next_session += 1
        return Seat(process, self._next_session, is_alone)

    def leave(self, seat: Seat) -> None:
        """The session has ended, or has no process any more."""
        process = seat.process
        process.num_sessions -= 1
        if process.num_sessions == 0 and process.is_retired:
            process.condemn(Death(Cause.CLOSED))
        self._give_back()

    def limit_to(self, most: int) -> None:
        """Lowers the capacity: the world behind the environment holds fewer sessions than its processes."""
        surplus = self._limit - max(1, most)
        if surplus > 0:
            self._limit -= surplus
            self._surplus += surplus

    async def close(self) -> None:
        self._is_closed = True
        await self._server.close()

    def _give_back(self) -> None:
        self.num_seated -= 1
        if self._surplus:
            self._surplus -= 1
        else:
            self._free.release()

    def _pick(self) -> Process | None:
        """The least busy process with room, unless there are so few that one more should share the work."""
        room = self.description.sessions_per_process
        open_ones = [one for one in self._processes if not one.is_retired and one.num_sessions < room]
        if not open_ones:
            return None
        best = min(open_ones, key=lambda one: one.num_sessions)
        if best.num_sessions and len(self._processes) < min(NUM_SPREAD, self.description.max_processes):
            return None
        best.num_sessions += 1
        return best

    async def _fork(self) -> Process:
        process = await self._ask_for_process() or await self._ask_for_process()
        if process is None:
            raise EnvironmentFailed("boot", "the host exits as soon as it has started")
        process.num_sessions = 1
        process.on_death = self._bury
        self._processes.append(process)
        self._count("host/forked")
        return process

    async def _ask_for_process(self) -> Process | None:
        """None if the host has just ended."""
        await self._revive()
        try:
            return await self._server.fork()
        except BootFailed:
            return None

    async def _revive(self) -> None:
        """Boots a killed host again; its sessions notice by themselves."""
        reason = ""
        for wait_s in BOOT_RETRY_S:
            if self._is_closed:
                raise EnvironmentFailed("boot", "the host was closed")
            if not self._server.is_dead:
                return
            await asyncio.sleep(wait_s)
            self._count("host/rebooted")
            await self._server.close()
            try:
                self._server = await self._boot(self._order)
            except (BootFailed, InvalidEnvironment) as error:
                reason = str(error)
        if self._server.is_dead:
            raise EnvironmentFailed("boot", reason)

    def _bury(self, process: Process) -> None:
        if process in self._processes:
            self._processes.remove(process)
        process.is_retired = True
        assert process.death is not None
        if process.death.cause is Cause.CLOSED:
            return
        self._count(f"host/{process.death.cause}")
        get_logger().warning(
            "an environment process died",
            environment=self._order.ref,
            cause=str(process.death.cause),
            detail=process.death.detail,
            num_sessions=process.num_sessions,
            num_suspects=len(process.death.suspects),
            output=self._server.tail[-500:],
        )
