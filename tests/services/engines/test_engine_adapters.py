"""An engine that is given an adapter holds the weights that a whole version would have brought, or those it had."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_core.learner import Learner
from gspo_core.learner_config import LearnerConfig, LoraConfig
from gspo_core.lora_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from gspo_core.objective_config import ObjectiveConfig
from gspo_core.versions import WeightsManifest
from services.engine.adapters import AdapterReader
from services.engine.checkpoint import CheckpointRejected, read_checkpoint
from services.engine.model import Decoder
from services.engines.protocol import Capabilities, EngineRejected
from services.engines.sglang import EngineClient
from services.engines.transport import EngineTransport
from services.files.job_dir import JobDir
from services.files.weights import WeightStore
from services.state.store import Claim, Store
from services.trainer.fleet import engines as engines_module
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import AsAdapters
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.engine_kit import EngineProcess, Models
from tests.services.rollout.rollout_kit import until

PROMPT = [10, 20, 30, 40, 7, 8, 9]
ADAPTER_PATH, WHOLE_PATH = "/update_weights_from_adapter", "/update_weights_from_disk"


class Wire(EngineTransport):
    """Counts calls."""

    def __init__(self) -> None:
        super().__init__(64)
        self.calls: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.calls.append(request.url.path)
        return await super().handle_async_request(request)

    def num(self, path: str) -> int:
        return self.calls.count(path)


@dataclass
class Published:
    """Versions of one job, each as an adapter and, elsewhere, whole."""

    store: WeightStore
    whole: WeightStore
    learners: tuple[Learner, Learner]

    def write(self, version: int) -> WeightsManifest:
        for learner in self.learners:
            generator = torch.Generator().manual_seed(version)
            for name, parameter in learner._policy.named_parameters():
                if "lora_" in name:
                    parameter.data = 0.1 * bool(version) * torch.randn(parameter.shape, generator=generator)
        self.whole.write(version, 1, version, self.learners[1].save_weights)
        return self.store.write(version, 1, version, self.learners[0].save_weights)

    def path(self, version: int) -> Path:
        return self.store.path(version)

    def label(self, version: int) -> str:
        return self.store.manifest(version).label


def learner_of(model_dir: Path, *, publishes_adapter: bool) -> Learner:
    config = LearnerConfig(lora=LoraConfig(rank=3, alpha=5), publishes_adapter=publishes_adapter)
    return Learner(model_dir, config, ObjectiveConfig(), seed=0)


@pytest.fixture(scope="module")
def learners(models: Models) -> tuple[Learner, Learner]:
    return learner_of(models.paths[0], publishes_adapter=True), learner_of(models.paths[0], publishes_adapter=False)


@pytest.fixture
def published(learners: tuple[Learner, Learner], tmp_path: Path) -> Published:
    made = Published(WeightStore(JobDir(tmp_path / "job_a")), WeightStore(JobDir(tmp_path / "whole")), learners)
    for version in range(3):
        made.write(version)
    return made


@pytest.fixture(scope="module")
def process(models: Models, warm_python: WarmPython) -> Iterator[EngineProcess]:
    """It begins with another model than the base of the adapters."""
    engine = EngineProcess(models.paths[1], python=warm_python.path)
    yield engine
    engine.close()


@pytest.fixture
async def wired(models: Models, process: EngineProcess) -> AsyncIterator[tuple[EngineClient, Wire]]:
    wire = Wire()
    async with httpx.AsyncClient(transport=wire, timeout=HANG_S, trust_env=False) as http:
        engine = EngineClient(process.url, http)
        await engine.pause("abort")
        await engine.load_weights(models.paths[1], "default")
        await engine.resume()
        yield engine, wire


async def logprobs(engine: EngineClient) -> list[float]:
    return (await engine.score(PROMPT))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_its_parameters_are_those_of_the_whole_version(
    dtype: torch.dtype, published: Published, models: Models
) -> None:
    """Whatever it held before, in the precision that it holds."""
    made = [
        Decoder(models.paths[number], device=torch.device("cpu"), dtype=dtype, context_length=None) for number in (1, 2)
    ]
    shapes = {name: tensor.shape for name, tensor in made[0].parameters.items()}
    reader = AdapterReader()
    for version in (1, 0, 2):
        label = published.label(version)
        made[0].load(reader.read(published.path(version), label, shapes, made[0].tied))
        made[1].load(read_checkpoint(published.whole.path(version), shapes, made[1].tied))
        for name, tensor in made[0].parameters.items():
            left, right = (one.contiguous().view(torch.uint8) for one in (tensor, made[1].parameters[name]))
            assert torch.equal(left, right), (version, name)


async def test_it_says_what_one_with_the_whole_version_says(
    published: Published, wired: tuple[EngineClient, Wire]
) -> None:
    engine, _ = wired
    assert (await engine.capabilities()).takes_adapters
    seen = []
    for version in (1, 2, 0, 2):
        await engine.load_adapter(published.path(version), published.label(version))
        assert (await engine.info()).label == published.label(version)
        seen.append(await logprobs(engine))
        await engine.load_weights(published.whole.path(version), "whole")
        assert await logprobs(engine) == seen[-1]
    assert seen[1] == seen[3]
    assert seen[0] != seen[1] != seen[2]


def of_another_base(directory: Path, models: Models) -> None:
    said = json.loads((directory / ADAPTER_CONFIG).read_text())
    (directory / ADAPTER_CONFIG).write_text(json.dumps(said | {"base_model_name_or_path": str(models.paths[2])}))


def nudged(directory: Path, _: Models) -> None:
    tensors = load_file(directory / ADAPTER_WEIGHTS)
    tensors[min(tensors)][0, 0] += 1
    save_file(tensors, directory / ADAPTER_WEIGHTS)


def without_manifest(directory: Path, _: Models) -> None:
    (directory / "manifest.json").unlink()


SPOILED: dict[str, tuple[Callable[[Path, Models], None], str]] = {
    "another base": (of_another_base, "not the base"),
    "damaged": (nudged, "other bits"),
    "incomplete": (without_manifest, "no complete version"),
}


@pytest.mark.parametrize("how", SPOILED)
async def test_what_it_refuses_changes_nothing(
    how: str, published: Published, wired: tuple[EngineClient, Wire], models: Models
) -> None:
    engine, _ = wired
    await engine.load_adapter(published.path(1), published.label(1))
    before = await logprobs(engine)
    spoil, message = SPOILED[how]
    label = published.label(2)
    kept = shutil.copytree(published.path(2), published.path(2).parent / "kept")
    spoil(published.path(2), models)
    with pytest.raises(EngineRejected, match=message):
        await engine.load_adapter(published.path(2), label)
    assert (await engine.info()).label == published.label(1)
    assert await logprobs(engine) == before
    shutil.rmtree(published.path(2))
    kept.rename(published.path(2))
    await engine.load_adapter(published.path(2), label)
    assert await logprobs(engine) != before


async def test_a_version_of_another_name_is_refused(published: Published, wired: tuple[EngineClient, Wire]) -> None:
    engine, _ = wired
    with pytest.raises(EngineRejected, match=r"holds job_a/1/1, not job_a/1/2"):
        await engine.load_adapter(published.path(1), published.label(2))


def test_a_model_of_another_shape_is_refused(published: Published) -> None:
    with pytest.raises(CheckpointRejected, match="shape"):
        AdapterReader().read(
            published.path(1),
            published.label(1),
            {name: torch.Size((1,)) for name in load_file(published.whole.path(1) / "model.safetensors")},
            frozenset(),
        )


def test_an_engine_that_cannot_merge_is_refused_by_name() -> None:
    transport = AsAdapters()
    assert transport.unfit(Capabilities("embedded", names_versions=True, takes_adapters=True)) is None
    reason = transport.unfit(Capabilities("vLLM 9", names_versions=True))
    assert reason is not None
    assert "vLLM 9" in reason
    assert "weight_transport disk" in reason


async def test_a_pool_gives_adapters_to_every_engine_and_again_after_a_restart(
    learners: tuple[Learner, Learner],
    models: Models,
    wired: tuple[EngineClient, Wire],
    store: Store,
    claim: Claim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.1)
    monkeypatch.setattr(engines_module, "RETRY_S", 0.1)
    engine, wire = wired
    weights = WeightStore(JobDir(tmp_path / claim.job_id))
    mine = Published(weights, WeightStore(JobDir(tmp_path / "whole")), learners)
    before = wire.num(WHOLE_PATH)
    pool = EnginePool(
        store, claim.job_id, claim.token, weights, [engine.url], lambda url: engine, transport=AsAdapters()
    )
    running = asyncio.create_task(pool.run())
    try:
        for version in range(3):
            await pool.publish(manifest := mine.write(version))
            await pool.wait_for(manifest)
        assert (await engine.info()).label == manifest.label
        expected = await logprobs(engine)
        # It goes back to its first weights, as after a restart.
        num = wire.num(ADAPTER_PATH)
        await engine.load_weights(models.paths[1], "default")
        await until(lambda: wire.num(ADAPTER_PATH) > num)
        await pool.wait_for(manifest)
        await until_label(engine, manifest.label)
        assert await logprobs(engine) == expected
        assert wire.num(WHOLE_PATH) == before + 1
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_label(engine: EngineClient, label: str) -> None:
    async with asyncio.timeout(HANG_S):
        while (await engine.info()).label != label or not await engine.is_ready():
            await asyncio.sleep(0.02)
