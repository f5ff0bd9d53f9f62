"""Which kinds of sandboxes an installation offers, as its settings say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from environments.sandbox.contract import Sandbox, Sandboxes, SandboxFailed
from gspo_core.outbound import AddressRefused, Network, parse_networks
from services.hosts.sandboxes.container import ContainerSandboxes
from services.hosts.walls.tiers import Tier
from services.process.settings import Settings


@dataclass
class ConfiguredRemote:
    """A server elsewhere; its name is resolved when it is first needed, not when a service starts."""

    url: str
    key: str
    networks: tuple[Network, ...]
    _made: Sandboxes | None = None

    def refusal(self) -> str | None:
        if not self.url or not self.key:
            return "GSPO_SANDBOX_URL and GSPO_SANDBOX_KEY name no server of sandboxes"
        try:
            return self._server().refusal()
        except AddressRefused as refused:
            return f"GSPO_SANDBOX_URL: {refused}"

    def create(self, base: str = "") -> Sandbox:
        try:
            return self._server().create(base)
        except AddressRefused as refused:
            raise SandboxFailed(str(refused)) from None

    def _server(self) -> Sandboxes:
        from environments.sandbox.remote import over_url  # most installations have none elsewhere

        self._made = self._made or over_url(self.url, self.key, self.networks)
        return self._made


def offers(settings: Settings) -> Mapping[Tier, Sandboxes]:
    key = settings.sandbox_key.get_secret_value() if settings.sandbox_key else ""
    kinds: dict[Tier, Sandboxes] = {
        Tier.CONTAINER: ContainerSandboxes(settings.sandbox_images),
        Tier.REMOTE: ConfiguredRemote(settings.sandbox_url or "", key, parse_networks(settings.outbound_networks)),
    }
    if settings.sandboxes_ready:
        from services.hosts.sandboxes.warm import WarmSandboxes  # most installations prepare none

        return {tier: WarmSandboxes(kind, settings.sandboxes_ready) for tier, kind in kinds.items()}
    return kinds
