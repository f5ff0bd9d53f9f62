"""Hosts on this machine, each under the interpreter that its environment needs and behind its wall, connected by socket
pairs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from services.hosts.policy import WallPolicy
from services.hosts.server import HostOrder, RunningHost
from services.hosts.venv import Interpreters


@dataclass(frozen=True, slots=True)
class LocalHosts:
    interpreters: Interpreters
    policy: WallPolicy = field(default_factory=WallPolicy)

    async def boot(self, order: HostOrder) -> RunningHost:
        """Raises ``InvalidEnvironment`` or ``BootFailed``."""
        return await RunningHost.boot(await self.prepared(order))

    async def prepared(self, order: HostOrder) -> HostOrder:
        """With its interpreter and its wall. Raises ``InvalidEnvironment``."""
        walled = await asyncio.to_thread(self.policy.applied, order)
        return replace(walled, python=await self.interpreters.for_environment(order.ref))
