"""One real server for all engine tests, brought back to a known state before each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from services.engines.http_engine import open_http
from services.engines.sglang import EngineClient
from tests.apparatus.warm_python import WarmPython
from tests.services.engines.engine_kit import NUM_VERSIONS, UNHURRIED, EngineProcess, Models, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(tuple(make_model(root / f"v{version}", seed=version) for version in range(NUM_VERSIONS)))


@pytest.fixture(scope="session")
def shared_engine(models: Models, warm_python: WarmPython) -> Iterator[EngineProcess]:
    engine = EngineProcess(models.paths[0], "--max-concurrency", "64", python=warm_python.path, module=UNHURRIED)
    yield engine
    engine.close()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with open_http() as client:
        yield client


@pytest.fixture
async def engine(shared_engine: EngineProcess, models: Models, http: httpx.AsyncClient) -> EngineClient:
    """The shared server, idle, with version 0 under the label ``default``."""
    client = EngineClient(shared_engine.url, http)
    await client.pause("abort")
    await client.load_weights(models.paths[0], "default")
    await client.resume()
    return client
