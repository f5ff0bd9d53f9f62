"""How a version's tensors reach an engine: read from a shared volume, or sent through a process group.

Rule: a version is whole and verified on the trainer's disk before it goes anywhere, and sending reads it from there.
Each engine has its own group, so losing one does not affect the others. After a failed send the engine's weights are
unknown: its group is dropped, and the next attempt is a full load from disk if the engine finds the folder, else a new
group. This module does not decide when to load.
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

# Timeout for joining and per tensor: a large model's largest takes half a minute over a slow network.
_TIMEOUT_S = 120.0


class WeightTransport(Protocol):
    @property
    def max_engines_at_once(self) -> int | None:
        """None: as many as the pool allows."""

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        """Like ``Engine.load_weights``, on a paused engine."""

    async def forget(self, engine: Engine) -> None:
        """Call when the engine has left or restarted."""


class FromDisk:
    """For engines that see the folder under the same path."""

    max_engines_at_once: int | None = None

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        await engine.load_weights(path, label, flush_cache=flush, timeout_s=timeout_s)

    async def forget(self, engine: Engine) -> None:
        return


class ThroughGroup:
    """gloo from the CPU, NCCL from a GPU."""

    max_engines_at_once: int | None = 1
    """The sender has one network link; an engine should not stay paused while it waits for its turn."""

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._groups: dict[str, WeightGroup] = {}
        self._failed: set[str] = set()
        """Engines whose next load is from disk."""

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        if engine.url in self._failed:
            self._failed.discard(engine.url)
            get_logger().warning("loading weights from disk after a failed transfer", engine=engine.url, label=label)
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
    """Memory-mapped, not copied: pages load as they are sent."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _address_towards(url: str) -> str:
    """This machine's address on the route to that host; sends nothing."""
    host = httpx.URL(url).host
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
