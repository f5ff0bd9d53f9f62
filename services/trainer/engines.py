"""Which engines sample for a job, and with which weights: kept up to date apart from the step loop.

New weights are loaded by all engines at once: paused without aborting, loaded, resumed. Requests in flight survive
and go on under the new version. An engine that fails to load stays paused, is left out and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gspo_core.types import WeightsManifest
from services.engine_beats import engine_record
from services.engine_client import EngineClient, EngineError, EngineRejected
from services.store import Store
from services.telemetry import get_logger
from services.weights import WeightStore

RETRY_S = 1.0
# How often an engine is asked whether it still holds what it was given: one that was restarted holds it no more.
WATCH_S = 2.0


@dataclass
class _Engine:
    url: str
    client: EngineClient
    label: str = ""
    """Of the weights that it holds; empty while unknown."""
    switches_s: list[float] = field(default_factory=list)
    """How long each switch paused it."""


class Engines:
    """The engines of one job."""

    def __init__(
        self,
        store: Store,
        job: str,
        token: str,
        weights: WeightStore,
        urls: Sequence[str],
        connect: Callable[[str], EngineClient],
    ) -> None:
        self._store = store
        self._job = job
        self._token = token
        self._weights = weights
        self._engines = [_Engine(url, connect(url)) for url in urls]
        self._target: WeightsManifest | None = None
        self._changed = asyncio.Condition()

    async def publish(self, manifest: WeightsManifest) -> None:
        """Let the engines move to ``manifest`` as soon as they can."""
        async with self._changed:
            self._target = manifest
            self._changed.notify_all()

    async def wait_for(self, manifest: WeightsManifest, *, num_engines: int = 1) -> None:
        """Until every serving engine, and at least ``num_engines``, hold ``manifest`` or something newer."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: len(self._versions()) >= num_engines and min(self._versions()) >= manifest.version
            )

    def versions_in_use(self) -> set[int]:
        return set(self._versions())

    def _versions(self) -> list[int]:
        """One per engine that serves."""
        return [int(engine.label.rpartition("/")[2]) for engine in self._engines if engine.label]

    def last_switch_s(self) -> float:
        """The longest pause of the newest switch."""
        return max((engine.switches_s[-1] for engine in self._engines if engine.switches_s), default=0.0)

    async def run(self) -> None:
        """Move engines to the newest published version until cancelled."""
        while True:
            target = await self._next_target()
            if target is None:
                await asyncio.gather(*(self._verify(engine) for engine in self._engines if engine.label))
                continue
            results = await asyncio.gather(*(self._switch(engine, target) for engine in self._outdated(target)))
            async with self._changed:
                self._changed.notify_all()
            if not all(results):
                await asyncio.sleep(RETRY_S)

    def _outdated(self, target: WeightsManifest) -> list[_Engine]:
        return [engine for engine in self._engines if engine.label != target.label]

    async def _next_target(self) -> WeightsManifest | None:
        """What some engine does not hold yet; None after a while in which all hold what they should."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_S), self._changed:
                await self._changed.wait_for(lambda: self._target is not None and bool(self._outdated(self._target)))
                return self._target
        return None

    async def _verify(self, engine: _Engine) -> None:
        try:
            held = (await engine.client.model_info()).get("weight_version")
        except EngineError as error:
            held = str(error)
        if held != engine.label:
            get_logger().warning("engine lost its weights", engine=engine.url, label=engine.label, held=held)
            engine.label = ""

    async def release(self) -> None:
        """Give the engines back, so that they can serve another job."""
        for engine in self._engines:
            await self._store.unbind_engine(self._job, self._token, engine.url)

    async def _load(self, engine: _Engine, target: WeightsManifest) -> None:
        try:
            await engine.client.load_weights(self._weights.path(target.version), target.label)
        except EngineRejected:
            # It holds what it held before: what is in flight there goes on.
            await engine.client.resume()
            raise

    async def _switch(self, engine: _Engine, target: WeightsManifest) -> bool:
        """False: not now; the engine does not answer, or it serves another job."""
        try:
            info = await engine.client.model_info()
            await self._store.register_engine(engine_record(engine.url, info))
            if not await self._store.bind_engine(self._job, self._token, engine.url):
                return False
            started = time.monotonic()
            await engine.client.pause()
            await self._load(engine, target)
            await engine.client.resume()
        except EngineError as error:
            engine.label = ""
            get_logger().warning("engine not switched", engine=engine.url, label=target.label, error=str(error))
            return False
        engine.switches_s.append(time.monotonic() - started)
        engine.label = target.label
        get_logger().info("engine switched", engine=engine.url, label=target.label, paused_s=engine.switches_s[-1])
        return True
