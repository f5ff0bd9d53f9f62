"""A delta gives the next version bit for bit, or the engine keeps what it holds and one whole load heals it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_core.versions import WeightsManifest
from services.engine.deltas import follow
from services.engines.protocol import EngineDirty
from services.engines.sglang import EngineClient
from services.engines.transport import EngineTransport
from services.files.job_dir import JobDir
from services.files.weight_deltas import (
    DELTA_NAME,
    DeltaRefused,
    chain_to,
    digest_in,
    gaps_of,
    indices_of,
    read_delta,
    tensors_in,
    write_delta,
)
from services.files.weights import WeightStore
from services.state.store import Claim, Store
from services.trainer.fleet import engines as engines_module
from services.trainer.fleet.engines import EnginePool
from services.trainer.fleet.weight_transport import AsDeltas
from tests.apparatus.warm_python import WarmPython
from tests.patience import HANG_S
from tests.services.engines.engine_kit import EngineProcess, Models
from tests.services.rollout.rollout_kit import until

PROMPT = [10, 20, 30, 40]
FILE = "model.safetensors"


@pytest.mark.parametrize(
    "indices",
    [[], [0], [254], [255], [256], [0, 1, 2], [509, 510, 511], [0, 100_000], list(range(0, 3000, 7)), [65_280]],
)
def test_gaps_lead_back_to_the_indices(indices: list[int]) -> None:
    given = np.array(indices, np.int64)
    assert indices_of(gaps_of(given)).tolist() == indices


def test_gaps_of_random_indices_lead_back() -> None:
    rng = np.random.default_rng(0)
    for share in (0.001, 0.01, 0.2, 0.9):
        indices = np.flatnonzero(rng.random(50_000) < share)
        assert np.array_equal(indices_of(gaps_of(indices)), indices)


@dataclass
class Versions:
    """Of one job, each made of the one before by small changes."""

    store: WeightStore
    first: Path
    dtype: torch.dtype

    def write(self, version: int, share: float = 0.01) -> WeightsManifest:
        def save(directory: Path) -> None:
            source = self.store.path(version - 1) if self.store.has(version - 1) else self.first
            shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.gspo", "manifest*"))
            tensors = {name: one.to(self.dtype) for name, one in load_file(directory / FILE).items()}
            if version:
                tensors = {name: changed(one, version, share) for name, one in tensors.items()}
            save_file(tensors, directory / FILE, metadata={"format": "pt"})

        return self.store.write(version, 1, version, save)

    def path(self, version: int) -> Path:
        return self.store.path(version)

    def label(self, version: int) -> str:
        return self.store.manifest(version).label


def changed(tensor: torch.Tensor, seed: int, share: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    is_hit = torch.rand(tensor.shape, generator=generator) < share
    return torch.where(is_hit, tensor * 1.05 + 0.01, tensor)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def versions(request: pytest.FixtureRequest, models: Models, tmp_path: Path) -> Versions:
    store = WeightStore(JobDir(tmp_path / "job_a"), write_delta=write_delta)
    made = Versions(store, models.paths[0], request.param)
    for version in range(4):
        made.write(version)
    return made


def held(versions: Versions, version: int) -> dict[str, torch.Tensor]:
    return load_file(versions.path(version) / FILE)


def test_a_chain_gives_every_version_bit_for_bit(versions: Versions) -> None:
    whole = (versions.path(3) / FILE).stat().st_size
    assert (versions.path(3) / DELTA_NAME).stat().st_size < whole / 10
    chain = chain_to(versions.path(3), versions.label(0))
    assert chain == [versions.path(number) for number in (1, 2, 3)]
    reached = follow(held(versions, 0), versions.label(0), chain)
    assert reached.digest == digest_in(versions.path(3))
    result = held(versions, 0) | reached.tensors
    for name, tensor in held(versions, 3).items():
        assert result[name].dtype == tensor.dtype
        assert torch.equal(result[name].view(torch.uint8), tensor.view(torch.uint8))
    assert chain_to(versions.path(3), "job_a/1/77") is None


def test_bits_that_are_equal_as_numbers_are_told_apart(versions: Versions, tmp_path: Path) -> None:
    for name, value in (("v0", 0.0), ("v1", -0.0)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.full((900,), 1.0), "b": torch.tensor([value, 2.0])}, tmp_path / name / FILE)
    assert write_delta(tmp_path / "v0", "j/1/0", tmp_path / "v1", "j/1/1")
    reached = follow(load_file(tmp_path / "v0" / FILE), "j/1/0", [tmp_path / "v1"])
    assert torch.signbit(reached.tensors["b"]).tolist() == [True, False]
    assert reached.tensors.keys() == {"b"}


def test_where_everything_changed_a_delta_is_no_more_than_the_whole(versions: Versions) -> None:
    for version, share in ((4, 1.0), (5, 0.6)):
        versions.write(version, share=share)
        delta, whole = versions.path(version) / DELTA_NAME, versions.path(version) / FILE
        assert not delta.exists() or delta.stat().st_size <= whole.stat().st_size


def test_where_nothing_is_as_it_was_nothing_is_written(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    for name in ("v0", "v1"):
        (tmp_path / name).mkdir()
        save_file({"a": torch.from_numpy(rng.integers(0, 2**15, 4000, np.int16))}, tmp_path / name / FILE)
    assert not write_delta(tmp_path / "v0", "j/1/0", tmp_path / "v1", "j/1/1")
    assert chain_to(tmp_path / "v1", "j/1/0") is None


def test_deltas_since_a_whole_version_are_together_smaller_than_the_whole(versions: Versions) -> None:
    whole = sum(one.bits.nbytes for one in tensors_in(versions.path(0)).values())
    chain, wholes = 0, 0
    for version in range(4, 16):
        versions.write(version, share=0.15)
        path = versions.path(version) / DELTA_NAME
        is_delta = path.exists()
        chain = chain + path.stat().st_size if is_delta else 0
        wholes += not is_delta
        assert chain < 1.05 * whole
        assert chain_to(versions.path(version), versions.label(version - 1)) is not None or not is_delta
    assert 1 <= wholes < 12


def test_behind_a_damaged_delta_a_version_is_whole(versions: Versions) -> None:
    (versions.path(3) / DELTA_NAME).write_bytes(b"damaged")
    versions.write(4)
    assert not (versions.path(4) / DELTA_NAME).exists()


def test_differences_wrap_around(tmp_path: Path) -> None:
    numbers = torch.tensor([[0, -1], [-32768, 32767], [1, 32767], [-2, 5]], dtype=torch.int16)
    for name, row in (("v0", 0), ("v1", 1)):
        (tmp_path / name).mkdir()
        bits = torch.cat([numbers[:, row], torch.zeros(400, dtype=torch.int16)])
        save_file({"a": bits.view(torch.bfloat16)}, tmp_path / name / FILE)
    assert write_delta(tmp_path / "v0", "j/1/0", tmp_path / "v1", "j/1/1")
    [(_, indices, differences)] = read_delta(tmp_path / "v1").changes()
    assert indices is not None
    assert indices.tolist() == [0, 1, 2, 3]
    start = numbers[:, 0].numpy().view(np.uint16)
    assert (start + differences).view(np.int16).tolist() == numbers[:, 1].tolist()


def test_a_step_by_the_last_bit_costs_little(tmp_path: Path) -> None:
    """What a small learning rate does to bfloat16: one in fifty elements goes to its neighbour."""
    rng = np.random.default_rng()
    old = rng.normal(size=200_000).astype(np.float32)
    bits = torch.from_numpy(old).to(torch.bfloat16).view(torch.int16)
    hit = torch.from_numpy(rng.random(len(old)) < 0.02)
    step = torch.from_numpy(rng.choice([-1, 1], len(old)).astype(np.int16))
    for name, values in (("v0", bits), ("v1", torch.where(hit, bits + step, bits))):
        (tmp_path / name).mkdir()
        save_file({"a": values.view(torch.bfloat16)}, tmp_path / name / FILE)
    assert write_delta(tmp_path / "v0", "j/1/0", tmp_path / "v1", "j/1/1")
    assert (tmp_path / "v1" / DELTA_NAME).stat().st_size < 0.016 * (tmp_path / "v1" / FILE).stat().st_size


@pytest.mark.parametrize("numbers", [[2, 3], [1, 1], [2, 1], [3]], ids=["lost", "doubled", "reordered", "skipped"])
def test_a_chain_that_does_not_fit_is_refused(versions: Versions, numbers: list[int]) -> None:
    with pytest.raises(DeltaRefused, match="builds on"):
        follow(held(versions, 0), versions.label(0), [versions.path(number) for number in numbers])


def test_what_is_not_what_its_label_says_is_refused(versions: Versions) -> None:
    with pytest.raises(DeltaRefused, match="is not job_a/1/1"):
        follow(held(versions, 0), versions.label(1), [versions.path(2)])
    other = {name: one.double() for name, one in held(versions, 0).items()}
    with pytest.raises(DeltaRefused, match="held as float64"):
        follow(other, versions.label(0), [versions.path(1)])


@pytest.mark.parametrize("where", [0, 20, -1, -3000])
def test_every_damage_is_seen(versions: Versions, where: int) -> None:
    path = versions.path(1) / DELTA_NAME
    data = bytearray(path.read_bytes())
    data[where] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(DeltaRefused):
        follow(held(versions, 0), versions.label(0), [versions.path(1)])
    path.write_bytes(data[:-10])
    with pytest.raises(DeltaRefused):
        read_delta(versions.path(1))
    path.unlink()
    with pytest.raises(DeltaRefused, match="cannot be read"):
        read_delta(versions.path(1))


class Wire(EngineTransport):
    """Counts calls, and spoils the paths of deltas that ``spoil`` says."""

    def __init__(self) -> None:
        super().__init__(64)
        self.calls: list[str] = []
        self.spoil: Callable[[list[str]], list[str]] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.calls.append(path)
        if path == "/update_weights_from_deltas" and self.spoil is not None:
            body = json.loads(await request.aread())
            body["paths"], self.spoil = self.spoil(body["paths"]), None
            request = httpx.Request("POST", request.url, content=json.dumps(body), extensions=request.extensions)
        return await super().handle_async_request(request)

    def loads(self) -> list[str]:
        names = {"/update_weights_from_disk": "whole", "/update_weights_from_deltas": "delta"}
        return [names[path] for path in self.calls if path in names]


@pytest.fixture(scope="module")
def processes(models: Models, warm_python: WarmPython) -> Iterator[dict[torch.dtype, EngineProcess]]:
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    made = {
        dtype: EngineProcess(models.paths[0], "--dtype", name, python=warm_python.path) for dtype, name in names.items()
    }
    yield made
    for process in made.values():
        process.close()


@pytest.fixture
async def wired(
    versions: Versions, processes: dict[torch.dtype, EngineProcess]
) -> AsyncIterator[tuple[EngineClient, Wire]]:
    wire = Wire()
    async with httpx.AsyncClient(transport=wire, timeout=HANG_S) as http:
        yield EngineClient(processes[versions.dtype].url, http), wire


async def logprobs(engine: EngineClient) -> list[float]:
    return (await engine.score([*PROMPT, 7, 8, 9]))[0]


async def test_an_engine_that_followed_deltas_says_what_one_with_the_whole_says(
    versions: Versions, wired: tuple[EngineClient, Wire]
) -> None:
    engine, _ = wired
    await engine.load_weights(versions.path(3), versions.label(3))
    whole = await logprobs(engine)
    await engine.load_weights(versions.path(0), versions.label(0))
    assert await logprobs(engine) != whole
    assert (await engine.capabilities()).takes_deltas
    chain = [versions.path(1), versions.path(2)]
    await engine.load_deltas(chain, versions.label(2), base=versions.label(0))
    await engine.load_deltas([versions.path(3)], versions.label(3), base=versions.label(2))
    assert await logprobs(engine) == whole


@pytest.mark.parametrize("numbers", [[2], [1, 1], [2, 1], [1, 3]], ids=["lost", "doubled", "reordered", "gap"])
async def test_a_chain_that_does_not_fit_leaves_an_engine_as_it_was_and_in_doubt(
    versions: Versions, wired: tuple[EngineClient, Wire], numbers: list[int]
) -> None:
    engine, _ = wired
    await engine.load_weights(versions.path(0), versions.label(0))
    before = await logprobs(engine)
    paths = [versions.path(number) for number in numbers]
    with pytest.raises(EngineDirty, match="builds on"):
        await engine.load_deltas(paths, versions.label(numbers[-1]), base=versions.label(0))
    assert (await engine.info()).label == versions.label(0)
    assert await logprobs(engine) == before
    await engine.load_weights(versions.path(2), versions.label(2))
    assert (await engine.info()).label == versions.label(2)


async def test_a_pool_sends_deltas_heals_by_a_whole_load_and_lets_late_ones_catch_up(
    versions: Versions,
    wired: tuple[EngineClient, Wire],
    store: Store,
    claim: Claim,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines_module, "WATCH_S", 0.1)
    monkeypatch.setattr(engines_module, "RETRY_S", 0.1)
    engine, wire = wired
    await engine.pause("abort")
    await engine.load_weights(versions.first, "default")
    await engine.resume()
    wire.calls.clear()
    weights = WeightStore(JobDir(tmp_path / claim.job_id), write_delta=write_delta)
    mine = Versions(weights, versions.first, versions.dtype)
    pool = EnginePool(store, claim.job_id, claim.token, weights, [engine.url], lambda url: engine, transport=AsDeltas())
    running = asyncio.create_task(pool.run())
    try:
        for version in range(3):
            await pool.publish(manifest := mine.write(version))
            await pool.wait_for(manifest)
        assert wire.loads() == ["whole", "delta", "delta"]
        # It is given a chain that it cannot follow: in doubt, and then healed.
        wire.spoil = lambda paths: [*paths, *paths]
        await pool.publish(manifest := mine.write(3))
        await pool.wait_for(manifest)
        assert wire.loads()[3:] == ["delta", "whole"]
        # Two versions at once, as for one that was away for a while.
        mine.write(4)
        await pool.publish(manifest := mine.write(5))
        await pool.wait_for(manifest)
        assert wire.loads()[5:] == ["delta"]
        # Somebody loads other weights: what it holds is unknown, and it is given all.
        await engine.load_weights(versions.first, "default")
        await until(lambda: wire.loads()[6:] == ["whole", "whole"])
        await pool.wait_for(manifest)
        assert (await engine.info()).label == manifest.label
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
