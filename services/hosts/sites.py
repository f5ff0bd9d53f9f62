"""Hosts of registered environments: what `name@version` stands for is looked up where the host is started.

Rule: a job holds the name of a version and nothing of its content, and a host that reaches a URL which somebody named,
when it was registered or in a job, connects to public addresses and to the operator's networks only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from gspo_core.env import InvalidEnvironment
from services.hosts.named_urls import urls_in
from services.hosts.registry import EnvironmentRegistry
from services.hosts.server import HostOrder

Host = TypeVar("Host")


@dataclass(frozen=True, slots=True)
class Sites:
    """Where registered environments are, and where those of them may connect to that reach a URL."""

    registry: EnvironmentRegistry
    networks: tuple[str, ...] = ()
    elsewhere: bool = False
    """Hosts run in services of their own, which do not have what was uploaded."""

    def placed(self, order: HostOrder) -> HostOrder:
        """The order with what its host has to load; an import string stays. Raises ``InvalidEnvironment``."""
        if ":" in order.ref:
            return replace(order, networks=self.networks) if any(urls_in(order.config)) else order
        found = self.registry.place(order.ref)
        if self.elsewhere and found.paths:
            raise InvalidEnvironment(
                f"{order.ref} was uploaded; services elsewhere (GSPO_ENV_HOSTS) lack its files: only references run"
            )
        networks = self.networks if found.is_remote else None
        return replace(order, ref=found.ref, config=found.config, paths=found.paths, networks=networks)

    def booting(self, boot: Callable[[HostOrder], Awaitable[Host]]) -> Callable[[HostOrder], Awaitable[Host]]:
        """The same for registered ones as well."""

        async def boot_placed(order: HostOrder) -> Host:
            return await boot(await asyncio.to_thread(self.placed, order))

        return boot_placed
