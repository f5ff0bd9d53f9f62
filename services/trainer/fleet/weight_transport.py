"""How a version's tensors reach an engine: read from a shared volume, or sent through a process group.

Rule: a version is whole and verified on the trainer's disk before it goes anywhere, and sending reads it from there.
All that takes time without the engine (reading, meeting) is done in ``prepare``, before it is paused. All engines of a
sending are in one group. Where one fails it is left out and the others are sent everything again, at once; its own
weights are unknown, and its next load is a full one from disk if it finds the folder, else through a group again. This
module does not decide when to load.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import httpx

from services.engines.protocol import Capabilities, Engine, EngineDirty, EngineError, EngineRejected, info_within
from services.engines.weight_buckets import WeightBucket, buckets_in
from services.engines.weight_group import WeightGroup
from services.files.weight_deltas import chain_to
from services.process.telemetry import get_logger
from services.trainer.fleet.joint_sending import JointSending

# For the meeting and for each bucket, which takes half a minute over a slow network.
_TIMEOUT_S = 60.0
_SEND_S = 600.0
_SENDINGS = 2
_ANSWER_S = 5.0


class WeightTransport(Protocol):
    @property
    def sends_to_all(self) -> bool:
        """Whether all engines are paused together; else as many as the pool allows."""

    async def prepare(self, engines: Sequence[Engine], path: Path, label: str) -> None:
        """Call before any of these engines is paused for a load."""

    def withdraw(self, engine: Engine) -> None:
        """Call when an engine that was prepared for is not loaded, or no longer."""

    def unfit(self, capabilities: Capabilities) -> str | None:
        """Why no weights can go to such an engine this way."""

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        """Like ``Engine.load_weights``, on a paused engine."""

    async def forget(self, engine: Engine) -> None:
        """Call when the engine has left or restarted."""


class _EachByItself:
    """Each engine is loaded without the others, and nothing is prepared."""

    sends_to_all = False

    async def prepare(self, engines: Sequence[Engine], path: Path, label: str) -> None:
        return

    def withdraw(self, engine: Engine) -> None:
        return


class FromDisk(_EachByItself):
    """For engines that see the folder under the same path."""

    def unfit(self, capabilities: Capabilities) -> str | None:
        return None

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        await engine.load_weights(path, label, flush_cache=flush, timeout_s=timeout_s)

    async def forget(self, engine: Engine) -> None:
        return


class AsDeltas(_EachByItself):
    """From disk, as what changed since the version that the engine holds, where it can take that; else whole.

    What an engine holds is what it confirmed last here: after any failure the next load is a whole one.
    """

    def __init__(self) -> None:
        self._held: dict[str, str] = {}
        """Engine -> label."""
        self._takes_deltas: dict[str, bool] = {}

    def unfit(self, capabilities: Capabilities) -> str | None:
        return None

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        base = self._held.pop(engine.url, None)
        chain = None if base is None else await asyncio.to_thread(chain_to, path, base)
        if base is not None and chain is not None and await self._may_take(engine):
            await engine.load_deltas(chain, label, base=base, flush_cache=flush, timeout_s=timeout_s)
        else:
            await engine.load_weights(path, label, flush_cache=flush, timeout_s=timeout_s)
        self._held[engine.url] = label

    async def forget(self, engine: Engine) -> None:
        self._held.pop(engine.url, None)
        self._takes_deltas.pop(engine.url, None)

    async def _may_take(self, engine: Engine) -> bool:
        if engine.url not in self._takes_deltas:
            self._takes_deltas[engine.url] = (await engine.capabilities()).takes_deltas
        return self._takes_deltas[engine.url]


class AsAdapters(_EachByItself):
    """From disk, where a version is the low-rank additions alone. An engine that holds anything else than the version
    is given all of it, since that is no more."""

    def unfit(self, capabilities: Capabilities) -> str | None:
        if capabilities.takes_adapters:
            return None
        return (
            f"it is {capabilities.software}, which does not merge published adapters into their base as the trainer "
            "does. Use rollout.weight_transport disk, or an embedded engine"
        )

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        await engine.load_adapter(path, label, flush_cache=flush, timeout_s=timeout_s)

    async def forget(self, engine: Engine) -> None:
        return


class ThroughGroup:
    """gloo from the CPU, NCCL from a GPU to others."""

    sends_to_all = True

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = device
        self._group: WeightGroup | None = None
        self._sending: JointSending | None = None
        self._failed: set[str] = set()
        """Engines whose next load is from disk."""
        self._closing: set[asyncio.Task[None]] = set()

    def unfit(self, capabilities: Capabilities) -> str | None:
        if not capabilities.group_problem:
            return None
        return f"{capabilities.group_problem}. Or use rollout.weight_transport disk"

    async def prepare(self, engines: Sequence[Engine], path: Path, label: str) -> None:
        """Reads the version and lets the engines meet. Engines that miss the meeting are loaded from disk."""
        members = [engine for engine in engines if engine.url not in self._failed]
        buckets = await asyncio.to_thread(buckets_in, path) if members else []
        members = await self._meet(members)
        self._sending = JointSending(members, partial(self._send, buckets, label))

    async def load(self, engine: Engine, path: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        if engine.url in self._failed:
            self._failed.discard(engine.url)
            get_logger().warning("loading weights from disk after a failed transfer", engine=engine.url, label=label)
            await engine.load_weights(path, label, flush_cache=flush, timeout_s=timeout_s)
            return
        if self._sending is None:
            raise EngineRejected(f"{engine.url}: no sending was prepared for it")
        try:
            async with asyncio.timeout(timeout_s):
                await self._sending.take(engine, flush=flush)
        except EngineRejected:
            raise  # nothing was sent
        except BaseException:
            self._failed.add(engine.url)
            raise

    def withdraw(self, engine: Engine) -> None:
        if self._sending:
            self._sending.withdraw(engine.url)

    async def forget(self, engine: Engine) -> None:
        self.withdraw(engine)
        is_sending = self._sending is not None and self._sending.is_under_way
        if self._group and engine.url in self._group.urls and not is_sending:
            self._drop_group()

    async def _meet(self, engines: Sequence[Engine]) -> list[Engine]:
        """Those that are in the group now, which has no other members."""
        members = list(engines)
        while members and not (self._group and self._group.urls == {engine.url for engine in members}):
            self._drop_group()
            try:
                host = await asyncio.to_thread(_address_towards, members[0].url)
                self._group = await WeightGroup.join(members, host=host, device=self._device, timeout_s=_TIMEOUT_S)
            except (EngineError, OSError) as error:
                get_logger().warning("engines did not meet for weights", reason=str(error))
                answers = await asyncio.gather(*(info_within(engine, _ANSWER_S) for engine in members))
                lost = [engine for engine, answer in zip(members, answers, strict=True) if answer is None]
                absent = lost or members  # if all answer, the fault is unknown: each is loaded by itself
                self._failed |= {engine.url for engine in absent}
                members = [engine for engine in members if engine not in absent]
        return members

    async def _send(
        self, buckets: Sequence[WeightBucket], label: str, engines: Sequence[Engine], flushes: Mapping[str, bool]
    ) -> dict[str, EngineError]:
        """What failed, by engine. Those that did not fail by themselves are sent everything again, once."""
        failed: dict[str, EngineError] = {}
        left, why = list(engines), ""
        for _ in range(_SENDINGS):
            left, before = await self._meet(left), left
            failed |= {one.url: EngineDirty("it did not come to the meeting") for one in before if one not in left}
            if self._group is None or not left:
                return failed
            outcome = await self._group.send(buckets, label, flush_cache=flushes, timeout_s=_SEND_S)
            if outcome is None:
                return failed
            get_logger().warning("sending weights failed", label=label, reason=outcome.why, engines=sorted(outcome.by))
            self._drop_group()
            why = outcome.why
            failed |= {url: EngineDirty(f"handing over weights failed: {text}") for url, text in outcome.by.items()}
            left = [engine for engine in left if engine.url not in failed]
        return failed | {one.url: EngineDirty(f"handing over weights failed: {why}") for one in left}

    def _drop_group(self) -> None:
        if self._group:
            self._closing.add(closing := asyncio.create_task(self._group.close(), name="closing a group"))
            closing.add_done_callback(self._closing.discard)
            self._group = None


def _address_towards(url: str) -> str:
    """This machine's address on the route to that host; sends nothing."""
    host = httpx.URL(url).host
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
