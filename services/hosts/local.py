"""Hosts beside this process, each under the interpreter that its environment needs. They speak over socket pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.hosts.server import ForkServer, HostOrder
from services.hosts.venv import Interpreters


@dataclass(frozen=True, slots=True)
class LocalHosts:
    interpreters: Interpreters

    async def boot(self, order: HostOrder) -> ForkServer:
        """Raises ``InvalidEnvironment`` or ``BootFailed``."""
        return await ForkServer.boot(replace(order, python=await self.interpreters.for_environment(order.ref)))
