"""How a trainer keeps its engines at the newest weights; the engine here is SGLang's protocol without a model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from gspo_core.types import WeightFile, WeightsManifest
from services.engine_client import EngineClient
from services.store import Claim, Store
from services.trainer import engines as engines_module
from services.trainer.engines import Engines
from services.weights import WeightStore

DEADLINE_S = 10.0
URL = "http://engine"


class FakeEngine:
    def __init__(self) -> None:
        self.restart()
        self.num_loads = 0

    def restart(self) -> None:
        self.label, self.paused = "default", False

    def answer(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/update_weights_from_disk":
                self.label = msgspec.json.decode(request.content)["weight_version"]
                self.num_loads += 1
        return httpx.Response(200, content=msgspec.json.encode({"weight_version": self.label}))


async def until_serving(engine: FakeEngine, label: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while engine.label != label or engine.paused:
            await asyncio.sleep(0.005)


async def test_an_engine_that_was_restarted_is_given_its_weights_again(
    store: Store, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.02)
    engine = FakeEngine()
    async with httpx.AsyncClient(transport=httpx.MockTransport(engine.answer)) as http:
        weights = WeightStore(tmp_path / claim.job_id)
        engines = Engines(store, claim.job_id, claim.token, weights, [URL], lambda url: EngineClient(url, http))
        manifest = WeightsManifest(claim.job_id, 0, claim.epoch, 0, (WeightFile("model.safetensors", 1, "0" * 64),))
        moving = asyncio.create_task(engines.run())
        await engines.publish(manifest)
        await until_serving(engine, manifest.label)
        engine.restart()
        await until_serving(engine, manifest.label)
        assert engine.num_loads == 2
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
