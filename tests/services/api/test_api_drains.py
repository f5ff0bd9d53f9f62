"""Engines and trainers that are asked over HTTP to be left alone, or to leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gspo_core.cli import main as gspo
from gspo_core.client import Client
from services.api.http.audit import Audit
from services.files.audit_log import AuditLog
from services.state.fleet_records import EngineRecord, TrainerRecord
from services.state.process_requests import Drains
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Claim, Store
from tests.services.api.api_kit import ApiProcess, application, error_of, http_to

ENGINE = "http://10.0.0.7:30000"
PATH = f"/v1/engines/{ENGINE}/drain"


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, audit=Audit(AuditLog(tmp_path / "audit.jsonl").append)) as app, http_to(app) as http:
        yield http


async def state(http: httpx.AsyncClient) -> tuple[bool, str | None]:
    engines = [one for one in (await http.get("/v1/workers")).json()["data"] if one["role"] == "engine"]
    return engines[0].get("draining", False), engines[0]["job"]


async def test_an_engine_drains_until_its_job_gives_it_back_and_can_be_used_again(
    http: httpx.AsyncClient, store: Store, claim: Claim, tmp_path: Path
) -> None:
    await store.fleet.register_engine(EngineRecord(id=ENGINE, url=ENGINE))
    assert await store.fleet.bind(claim.job_id, claim.token, ENGINE)
    for path in (PATH, PATH.replace("/10", "%2F10", 1)):  # asking twice is asking once
        answer = await http.post(path)
        assert answer.status_code == 202
        assert answer.json() == {
            "object": "engine.drain",
            "id": ENGINE,
            "alive": True,
            "state": "draining",
            "job": claim.job_id,
        }
    assert await state(http) == (True, claim.job_id)
    await store.fleet.unbind(claim.job_id, claim.token, ENGINE)
    assert (await http.post(PATH)).json()["state"] == "drained"
    again = await http.delete(PATH)
    assert (again.status_code, again.json()["state"]) == (200, "in_use")
    assert await state(http) == (False, None)
    missing = await http.post("/v1/engines/http://nowhere/drain")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "engine_not_found")
    assert (tmp_path / "audit.jsonl").read_text().count(PATH.partition("?")[0][:40]) >= 4


async def test_an_engine_that_leaves_for_good_takes_the_wish_with_it(store: Store) -> None:
    await store.fleet.register_engine(EngineRecord(id=ENGINE, url=ENGINE))
    await store.fleet.drain_engine(ENGINE)
    await store.fleet.remove_engine(ENGINE)
    await store.fleet.register_engine(EngineRecord(id=ENGINE, url=ENGINE))
    assert [one.draining for one in await store.fleet.engines()] == [False]


async def test_a_trainer_is_asked_to_leave_and_an_engine_has_its_own_way(
    http: httpx.AsyncClient, store: Store, bus: Bus
) -> None:
    await store.fleet.register_trainer(TrainerRecord(id="trainer-0"))
    await store.fleet.register_engine(EngineRecord(id="engine-0", url="http://e"))
    answer = await http.post("/v1/workers/trainer-0/drain")
    assert (answer.status_code, answer.json()["id"]) == (202, "trainer-0")
    assert await Drains(bus._redis).is_asked("trainer-0")
    refused = await http.post("/v1/workers/engine-0/drain")
    assert (refused.status_code, error_of(refused)["code"]) == (409, "cannot_drain")
    assert "/v1/engines/" in error_of(refused)["message"]


def test_the_client_and_the_command_do_it(
    redis_server: RedisServer, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    async def register() -> None:
        from services.state.server import connect

        async with connect(redis_server.url) as redis:
            here = Store(redis)
            await here.fleet.register_engine(EngineRecord(id=ENGINE, url=ENGINE))
            await here.fleet.register_trainer(TrainerRecord(id="trainer-0"))

    asyncio.run(register())
    with ApiProcess(redis_server.url) as api:
        with Client(api.url) as client:
            assert client.drain_engine(ENGINE)["state"] == "drained"
            assert client.drain_engine(ENGINE, undo=True)["state"] == "in_use"
        for arguments, said in (
            (["drain", ENGINE], f"{ENGINE} is drained and may be stopped"),
            (["drain", ENGINE, "--undo"], f"{ENGINE} is in use again"),
            (["drain", "trainer-0"], "trainer-0 was asked to leave"),
        ):
            assert gspo([*arguments, "--url", api.url]) == 0
            assert said in capsys.readouterr().out
        assert gspo(["workers", "--url", api.url]) == 0
        shown = capsys.readouterr().out
        assert ENGINE in shown
        assert "trainer-0" in shown
