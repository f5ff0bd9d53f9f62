"""The contract of bus and store, test by test the one of the real servers, on the twin that is shipped for users."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from services.bus import Bus
from services.store import Claim, Store
from services.twin import TwinBus, TwinStore, World
from tests.services import test_bus, test_bus_set_aside, test_store_claims, test_store_jobs, test_store_records

# What a test may ask for that needs no server.
WITHOUT_SERVER = {"bus", "store", "claim", "monkeypatch", "tmp_path"}


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def bus(world: World) -> TwinBus:
    return TwinBus(world)


@pytest.fixture
def store(world: World) -> TwinStore:
    return TwinStore(world)


@pytest.fixture
async def claim(store: TwinStore) -> Claim:
    await store.create_job('{"name": "test"}')
    claim = await store.claim_job("trainer-0")
    assert claim is not None
    return claim


def _without_server(module: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        f"{name}__{module.__name__.rpartition('.')[2]}": test
        for name, test in vars(module).items()
        if name.startswith("test_") and callable(test) and _asks_for(test) <= WITHOUT_SERVER
        # Some look inside the real one.
        if not re.search(r"\b(store|bus)\._", inspect.getsource(test))
    }


def _asks_for(test: Callable[..., Any]) -> set[str]:
    """Fixtures, without the arguments that a parametrization gives."""
    given = {
        name.strip()
        for mark in getattr(test, "pytestmark", [])
        if mark.name == "parametrize"
        for name in (mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0])
    }
    return set(inspect.signature(test).parameters) - given


CONTRACT: dict[str, Callable[..., Any]] = {}
for _module in (test_bus, test_bus_set_aside, test_store_claims, test_store_jobs, test_store_records):
    CONTRACT |= _without_server(_module)
globals().update(CONTRACT)


def test_most_of_the_contract_is_here() -> None:
    """A suite that silently became empty would always pass."""
    assert len(CONTRACT) >= 60


@pytest.mark.parametrize(("real", "twin"), [(Bus, TwinBus), (Store, TwinStore)])
def test_the_twin_has_every_method_of_the_real_one_with_the_same_parameters(real: type, twin: type) -> None:
    for name, method in inspect.getmembers(real, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(twin, name)).parameters
            assert inspect.signature(method).parameters.items() <= ours.items(), name
