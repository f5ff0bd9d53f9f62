"""Hosts of registered environments: `name@version` is resolved where the host is started.

Rule: a job holds the name of a version and nothing of its content. If an environment's registration or a job names a
URL, the host connects to public addresses and the operator's networks only.
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
    """Where registered environments are kept, and which networks those that reach a URL may connect to."""

    registry: EnvironmentRegistry
    networks: tuple[str, ...] = ()
    elsewhere: bool = False
    """Hosts run in services elsewhere, which lack the uploaded files."""

    def placed(self, order: HostOrder) -> HostOrder:
        """The order with its reference resolved; an import string stays. Raises ``InvalidEnvironment``."""
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
        """``boot``, for registered environments as well."""

        async def boot_placed(order: HostOrder) -> Host:
            return await boot(await asyncio.to_thread(self.placed, order))

        return boot_placed
