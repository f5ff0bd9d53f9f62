"""Hosts of registered environments: `name@version` is resolved where the host is started.

Rule: a job holds the name of a version and nothing of its content. If an environment's registration or a job names a
URL, the host connects to public addresses and the operator's networks only; an agent also to its gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.json_value import JSON
from services.files.environments.named_urls import urls_in
from services.files.environments.registry import (
    EnvironmentNotFound,
    EnvironmentRegistry,
    Registration,
    parse_reference,
)
from services.hosts.server import HostOrder

Host = TypeVar("Host")


@dataclass(frozen=True, slots=True)
class Sites:
    """Where registered environments are kept, and which networks those that reach a URL may connect to."""

    registry: EnvironmentRegistry
    networks: tuple[str, ...] = ()
    elsewhere: bool = False
    """Hosts run in services elsewhere, which lack the uploaded files."""
    for_agents: tuple[str, ...] = ()
    """Networks that agents may connect to as well: that of their gateway."""

    def placed(self, order: HostOrder) -> HostOrder:
        """The order with its reference resolved; an import string stays. Raises ``InvalidEnvironment``."""
        placed = self._resolved(order)
        if placed.agent is None:
            return placed
        networks = self.networks if placed.agent.get("url") is not None else placed.networks
        return placed if networks is None else replace(placed, networks=(*networks, *self.for_agents))

    def _resolved(self, order: HostOrder) -> HostOrder:
        if ":" in order.ref:
            return replace(order, networks=self.networks) if any(urls_in(order.config)) else order
        one, root = self._look_up(order.ref)
        if (agent := one.agent if order.agent is None else order.agent) is not None:
            order = replace(order, agent=_judged_in_upload(agent, root))
        if self.elsewhere and root is not None:
            raise InvalidEnvironment(
                f"{order.ref} was uploaded; remote services (GSPO_ENV_HOSTS) lack its files and run references only"
            )
        if root is None:
            networks = self.networks if one.is_remote else None
            return replace(order, ref=one.ref, config=one.config, paths=(), networks=networks)
        ref = _in_upload(one.ref, root)
        return replace(order, ref=ref, config=one.config, paths=(str(root),), networks=None, is_upload=True)

    def _look_up(self, reference: str) -> tuple[Registration, Path | None]:
        """The version, and the directory of its upload if it has one."""
        parsed = parse_reference(reference)
        if parsed is None or parsed[1] is None:
            raise InvalidEnvironment(f"{reference} is neither an import string nor a registered version (name@version)")
        try:
            one = self.registry.get(reference)
        except EnvironmentNotFound as error:
            raise InvalidEnvironment(f"{error} below {self.registry.path}") from None
        if one.upload is None:
            return one, None
        root = self.registry.upload_dir(one.upload)
        if not root.is_dir():
            raise InvalidEnvironment(f"{one.id}: its upload is not below {self.registry.path}")
        return one, root

    def booting(self, boot: Callable[[HostOrder], Awaitable[Host]]) -> Callable[[HostOrder], Awaitable[Host]]:
        """``boot``, for registered environments as well."""

        async def boot_placed(order: HostOrder) -> Host:
            return await boot(await asyncio.to_thread(self.placed, order))

        return boot_placed


def _judged_in_upload(agent: Mapping[str, JSON], root: Path | None) -> Mapping[str, JSON]:
    """A file that judges its episodes is beside it. Raises ``InvalidEnvironment``."""
    reward = agent.get("reward")
    if root is None or not isinstance(reward, str):
        return agent
    return {**agent, "reward": _in_upload(reward, root)}


def _in_upload(ref: str, root: Path) -> str:
    """``ref`` with the whole path of its file, if it names one. Raises ``InvalidEnvironment`` for one elsewhere."""
    file = ref.rpartition(":")[0]
    if not file.endswith(".py"):
        return ref
    if not Path(f"{root}/{file}").resolve().is_relative_to(root.resolve()):
        raise InvalidEnvironment(f"{ref}: {file} lies outside of the upload, and an upload uses its own files only")
    return f"{root}/{ref}"
