"""Weights through a process group: a real embedded engine that shares no folder with its trainer.

What the engine sampled is compared with the version that it named, so a wrong tensor, or a mixture, shows.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from gspo_core.versions import WeightsManifest
from services.engines.http_engine import open_http
from services.engines.protocol import Generation
from services.engines.sglang import EngineClient
from services.engines.transport import EngineTransport
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.store import Claim, Store
from services.trainer.fleet import engines as engines_module
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import ThroughGroup
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.engine_kit import (
    NUM_VERSIONS,
    UNHURRIED,
    EngineProcess,
    Models,
    make_model,
    max_difference,
)
from tests.services.rollout.rollout_kit import until
from tests.services.trainer.trainer_kit import marked

PROMPT = [10, 20, 30, 40, 50]
TOLERANCE = 1e-4


class Wire(EngineTransport):
    """Counts calls. Cuts the connection under the sendings that ``cut`` numbers; hides folders of the trainer."""

    def __init__(self) -> None:
        super().__init__(64)
        self.calls: list[str] = []
        self.cut: set[int] = set()
        self.shares_volume = False
        self._num_sendings = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(path)
        if path == "/update_weights_from_disk" and not self.shares_volume:
            body = json.loads(await request.aread()) | {"model_path": "/nowhere"}
            request = httpx.Request("POST", request.url, content=json.dumps(body), extensions=request.extensions)
        if path == "/update_weights_from_distributed":
            number, self._num_sendings = self._num_sendings, self._num_sendings + 1
            if number in self.cut:
                raise httpx.ReadError("cut", request=request)
        return await super().handle_async_request(request)

    def num(self, path: str) -> int:
        return self.calls.count(path)


@dataclass
class Place:
    models: Models
    wire: Wire
    client: EngineClient
    engines: EnginePool
    weights: WeightStore
    claim: Claim
    store: Store
    running: asyncio.Task[None]
    started: list[asyncio.Task[Generation]] = field(default_factory=list)

    async def publish(self, version: int) -> WeightsManifest:
        source = self.models.paths[version]

        def save(directory: Path) -> None:
            shutil.copytree(source, directory, dirs_exist_ok=True)

        manifest = self.weights.write(version, self.claim.epoch, version, save)
        await self.engines.publish(manifest)
        return manifest

    def ask(self, num: int = 400) -> asyncio.Task[Generation]:
        call = self.client.generate(PROMPT, max_new_tokens=num, temperature=1.0, stop_token_ids=[])
        self.started.append(task := asyncio.create_task(call))
        return task

    async def until_sampling(self) -> None:
        async with asyncio.timeout(HANG_S):
            while (await self.client.loads())["loads"][0]["num_used_tokens"] < len(PROMPT) + 20:
                await asyncio.sleep(0.005)

    def assert_true(self, answer: Generation) -> None:
        """Every span is of the version that its label names."""
        for span in answer.spans:
            version = int(span.label.rpartition("/")[2])
            expected = self.models.logprobs(version, PROMPT, answer.output_ids[: span.end], 1.0)
            assert max_difference(answer.logprobs[span.start : span.end], expected[span.start :]) < TOLERANCE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(tuple(make_model(root / f"v{version}", seed=version) for version in range(NUM_VERSIONS)))


@pytest.fixture(scope="module")
def process(models: Models, warm_python: WarmPython) -> Iterator[EngineProcess]:
    engine = EngineProcess(models.paths[0], python=warm_python.path, module=UNHURRIED)
    yield engine
    engine.close()


@pytest.fixture
async def place(
    models: Models, process: EngineProcess, store: Store, claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.1)
    monkeypatch.setattr(engines_module, "RETRY_S", 0.1)
    wire = Wire()
    async with open_http() as direct, httpx.AsyncClient(transport=wire, trust_env=False) as http:
        before = EngineClient(process.url, direct)
        await before.pause("abort")
        await before.load_weights(models.paths[0], "default")
        await before.resume()
        weights = WeightStore(JobDir(tmp_path / claim.job_id))
        engines = EnginePool(
            store,
            claim.job_id,
            claim.token,
            weights,
            [process.url],
            lambda url: EngineClient(url, http),
            transport=ThroughGroup(),
        )
        running = asyncio.create_task(engines.run())
        client = EngineClient(process.url, direct)
        made = Place(models, wire, client, engines, weights, claim, store, running)
        yield made
        running.cancel()
        await asyncio.gather(running, *made.started, return_exceptions=True)
        await engines.release()


async def test_versions_come_over_the_group_while_requests_are_in_flight(place: Place) -> None:
    await place.engines.wait_for(await place.publish(0))
    asked = place.ask()
    await place.until_sampling()
    for version in (1, 2):
        await place.engines.wait_for(await place.publish(version))
    answer = await asked
    assert answer.spans[0].label.endswith("/0")
    assert len(answer.spans) > 1
    place.assert_true(answer)
    after = await place.ask(30)
    assert [span.label for span in after.spans] == [f"{place.claim.job_id}/{place.claim.epoch}/2"]
    place.assert_true(after)
    assert place.wire.num("/update_weights_from_disk") == 0
    assert place.wire.num("/init_weights_update_group") == 1, "the group is kept"
    assert place.wire.num("/update_weights_from_distributed") == 3


@pytest.mark.parametrize("shares_volume", [True, False])
async def test_a_sending_that_is_cut_makes_the_engine_dirty_until_a_full_load(
    place: Place, shares_volume: bool
) -> None:
    """From disk where the engine finds the folder, else through a group of its own."""
    await place.engines.wait_for(await place.publish(0))
    place.wire.shares_volume = shares_volume
    asked = place.ask()
    await place.until_sampling()
    place.wire.cut = {1}
    with marked(place.store.fleet) as states:
        newer = await place.publish(1)
        await place.engines.wait_for(newer)
    assert "dirty" in states[place.client.url]
    answer = await asked
    assert [span.label.rpartition("/")[2] for span in answer.spans] == ["0", "1"]
    place.assert_true(answer)
    num_loads = place.wire.num("/update_weights_from_disk"), place.wire.num("/init_weights_update_group")
    assert num_loads == ((1, 1) if shares_volume else (1, 2))
    await place.engines.wait_for(await place.publish(2))
    place.assert_true(await place.ask(30))
    assert place.wire.num("/update_weights_from_disk") == 1, "the next version goes through a group again"


async def test_an_engine_that_was_started_again_is_sent_everything_in_a_new_group(
    place: Place, process: EngineProcess
) -> None:
    """Its label says so; the group that it was in is not used again."""
    await place.engines.wait_for(await place.publish(0))
    await place.client.load_weights(place.models.paths[2], "default")  # what a restart leaves
    await until(lambda: place.wire.num("/init_weights_update_group") == 2)
    await until(lambda: bool(place.engines.ready()))
    place.assert_true(await place.ask(30))
    assert place.wire.num("/init_weights_update_group") == 2
    assert place.wire.num("/destroy_weights_update_group") == 1
