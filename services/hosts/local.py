"""Hosts on this machine, each under the interpreter that its environment needs and behind the wall that the operator's
policy gives it, connected by socket pairs.

Rule: an order gets the stronger wall and sandboxes of what the operator demands and what the job asks for. Without a
word of the operator it is ``wall`` where the kernel allows it. Where it does not, environments run as processes, which
is said aloud at start, and uploaded code does not run at all. What a job asks for and cannot have is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gspo_core.environment_contract import InvalidEnvironment
from services.files.data_dir import DataDir, HubKind
from services.hosts.server import HostOrder, RunningHost
from services.hosts.venv import Interpreters
from services.hosts.walls import control_groups
from services.hosts.walls.tiers import WALLS, Bounds, Tier, Wall
from services.process.settings import Settings
from services.process.telemetry import get_logger

if TYPE_CHECKING:
    from environments.sandbox.contract import Sandboxes


OF_WALLS = frozenset({"tier", "network", "disk_mb", "num_processes"})
"""What a job says of its hosts that is decided before one starts."""


@dataclass(frozen=True)
class WallPolicy:
    """How one installation walls its hosts."""

    least: Tier | None = None
    """None: the strongest that this machine offers."""
    may_ask_for_network: bool = False
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    walls: Mapping[Tier, Wall] = field(default_factory=lambda: WALLS)
    sandboxes: Callable[[], Mapping[Tier, Sandboxes]] = dict
    """Those of the tiers beyond the wall that this installation has; called only when one of these tiers is wanted."""

    @classmethod
    def of(cls, settings: Settings) -> WallPolicy:
        """Environments see the data sets that were fetched for all."""
        datasets = DataDir(settings.data_dir).hub.place(HubKind.DATASET)
        return cls(
            None if settings.env_tier is None else Tier.named(settings.env_tier),
            settings.env_network,
            tuple(map(str, (datasets, *settings.env_readable))),
            tuple(map(str, settings.env_writable)),
            tuple(map(str, settings.own_places)),
            sandboxes=_offers(settings),
        )

    def announce(self) -> None:
        """For the start of a service."""
        refusal = self.walls[Tier.WALL].refusal()
        if refusal is not None and self.least is not Tier.PROCESS:
            what = "no environment starts" if self.least else "environments run unwalled, uploaded ones not at all"
            get_logger().error(f"this machine offers no wall: {what}", reason=refusal, setting="GSPO_ENV_TIER")
            return
        if self.least and self.least > Tier.WALL and (missing := self._refusal(self.least)):
            get_logger().error("no environment starts", tier=str(self.least), reason=missing, setting="GSPO_ENV_TIER")
        if self.least is Tier.PROCESS:
            get_logger().warning("environments may run unwalled, uploaded ones too", setting="GSPO_ENV_TIER")
        if refusal is None:
            bounded, missing = control_groups.offer()
            get_logger().info("control groups around hosts", bounds=bounded or "nothing", missing=missing or "nothing")

    def applied(self, order: HostOrder) -> HostOrder:
        """The order behind its wall. Raises ``InvalidEnvironment``."""
        asked = {name: value for name, value in order.hosting.items() if name in OF_WALLS}
        hosting = {name: value for name, value in order.hosting.items() if name not in OF_WALLS}
        tier = self._tier(order, str(asked["tier"]) if "tier" in asked else None)
        if asked.get("network") and not self.may_ask_for_network:
            raise InvalidEnvironment(f"{order.ref} asks for the network, which GSPO_ENV_NETWORK does not allow")
        bounds = Bounds(**{name: int(asked[name]) for name in ("disk_mb", "num_processes") if name in asked})
        return replace(
            order,
            hosting=hosting,
            tier=min(tier, Tier.WALL),
            sandboxes=self.sandboxes()[tier] if tier > Tier.WALL else None,
            bounds=bounds,
            # Those that are reached over the network, or reach their policy over it.
            has_network=bool(asked.get("network")) or order.networks is not None or order.agent is not None,
            readable=(*order.readable, *self.readable),
            writable=(*order.writable, *self.writable),
            hidden=(*order.hidden, *self.hidden),
        )

    def _tier(self, order: HostOrder, asked: str | None) -> Tier:
        try:
            wanted = Tier.PROCESS if asked is None else Tier.named(asked)
        except ValueError as error:
            raise InvalidEnvironment(f"{order.ref}: {error}") from None
        least = Tier.WALL if self.least is None else self.least
        tier = max(wanted, least)
        refusal = self._refusal(tier)
        if refusal is None:
            return tier
        if self.least is None and wanted is Tier.PROCESS and not order.is_upload:
            return Tier.PROCESS
        uploaded = " Uploaded code runs unwalled only with GSPO_ENV_TIER=process." if order.is_upload else ""
        raise InvalidEnvironment(f"{order.ref} must run in tier {tier}, which this machine lacks: {refusal}.{uploaded}")

    def _refusal(self, tier: Tier) -> str | None:
        """From ``container`` on, a wall stands around the host as well."""
        refusal = self.walls[min(tier, Tier.WALL)].refusal()
        if refusal is not None or tier <= Tier.WALL:
            return refusal
        if (kind := self.sandboxes().get(tier)) is None:
            return "no sandboxes of that kind are set up"
        return kind.refusal()


def _offers(settings: Settings) -> Callable[[], Mapping[Tier, Sandboxes]]:
    """Makes them at the start of a service if any are set up; else at each question, to say what is missing."""

    def load() -> Mapping[Tier, Sandboxes]:
        from services.hosts.sandboxes.offers import offers  # most installations set none up

        return offers(settings)

    if not settings.sandbox_images and not settings.sandbox_url:
        return load
    kinds = load()
    return lambda: kinds


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
