"""Hosts on this machine, each under the interpreter that its environment needs, connected by socket pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.hosts.server import HostOrder, RunningHost
from services.hosts.venv import Interpreters


@dataclass(frozen=True, slots=True)
class LocalHosts:
    interpreters: Interpreters

    async def boot(self, order: HostOrder) -> RunningHost:
        """Raises ``InvalidEnvironment`` or ``BootFailed``."""
        return await RunningHost.boot(replace(order, python=await self.interpreters.for_environment(order.ref)))
