"""How the tensors of a version come to an engine: read by it from a volume that it shares, or sent through a group.

Rule: a version is on the trainer's disk, whole and verified, before it goes anywhere; what is sent is read from there.
Each engine has a group of its own, so that one that is lost costs the others nothing. After a failed sending nobody
knows what the engine holds: its group is given up, and the next attempt is a full load from disk where the engine finds
the folder, and a new group where it does not. When to load is not decided here.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Protocol

import httpx
from safetensors.torch import load_file
from torch import Tensor

from services.engines.protocol import Engine
from services.engines.weight_group import WeightGroup
from services.process.telemetry import get_logger

# To meet, and for each tensor: the largest one of a large model takes half a minute over a slow network.
_TIMEOUT_S = 120.0


class WeightTransport(Protocol):
    @property
    def max_engines_at_once(self) -> int | None:
        """None: as many as the pool allows."""

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        """As ``Engine.load_weights``, on a paused engine."""

    async def forget(self, engine: Engine) -> None:
        """It left, or was started again."""


class FromDisk:
    """The engine sees the folder under the path that it has here."""

    max_engines_at_once: int | None = None

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        await engine.load_weights(path, label, flush_cache=flush, timeout_s=timeout_s)

    async def forget(self, engine: Engine) -> None:
        return


class ThroughGroup:
    """gloo from the CPU, NCCL from a GPU."""

    max_engines_at_once: int | None = 1
    """The sender has one network; an engine that waits for its turn should not be paused for it."""

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._groups: dict[str, WeightGroup] = {}
        self._failed: set[str] = set()
        """Engines whose next load is from disk."""

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        if engine.url in self._failed:
            self._failed.discard(engine.url)
            get_logger().warning("from disk after a failed sending", engine=engine.url, label=label)
            await engine.load_weights(path, label, flush_cache=flush, timeout_s=timeout_s)
            return
        try:
            tensors = await asyncio.to_thread(_read, path)
            group = await self._group_of(engine)
            await group.send(tensors, label, flush_cache=flush, timeout_s=timeout_s)
        except BaseException:
            self._failed.add(engine.url)
            await self.forget(engine)
            raise

    async def forget(self, engine: Engine) -> None:
        if group := self._groups.pop(engine.url, None):
            await group.close()

    async def _group_of(self, engine: Engine) -> WeightGroup:
        if engine.url not in self._groups:
            host = await asyncio.to_thread(_address_towards, engine.url)
            self._groups[engine.url] = await WeightGroup.join(
                [engine], host=host, device=self._device, timeout_s=_TIMEOUT_S
            )
        return self._groups[engine.url]


def _read(path: Path) -> dict[str, Tensor]:
    """Mapped, not copied: pages come in as they are sent."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _address_towards(url: str) -> str:
    """Under which address this machine talks to that host; nothing is sent."""
    host = httpx.URL(url).host
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
