"""Who may use the API, and what it refuses to be opened to."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from services.api.http.access import Access, AccessRefused, require_safe_bind
from services.api.http.key_ring import KeyRing
from services.files.data_dir import KeysDir
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import SPEC, ApiProcess, application, error_of, http_to

KEY = "gspo_a1_0123456789abcdef"


@pytest.fixture
async def app(store: Store) -> AsyncIterator[FastAPI]:
    async with application(store) as app:
        yield app


@pytest.fixture
async def guarded(store: Store) -> AsyncIterator[FastAPI]:
    async with application(store, keys=["another-key", KEY]) as app:
        yield app


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/workers", "/v1/nothing", "/nothing", "/v1/jobs/job_1/events"])
async def test_without_a_key_nothing_that_is_not_open_answers(guarded: FastAPI, path: str):
    async with http_to(guarded, host="api.example") as http:
        answer = await http.get(path)
    assert (answer.status_code, error_of(answer)["code"]) == (401, "missing_key")
    assert error_of(answer)["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/openapi.json"])
async def test_health_and_the_document_are_open(guarded: FastAPI, path: str):
    async with http_to(guarded, host="api.example") as http:
        assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        *(f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer {KEY.upper()}", f"Bearer {KEY} {KEY}"),
        *("Bearer \x7f", "Bearer é"),
    ],
)
async def test_keys_that_are_nearly_right_are_wrong(guarded: FastAPI, authorization: str):
    async with http_to(guarded) as http:
        answer = await http.get("/v1/jobs", headers=[(b"authorization", authorization.encode())])
    assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_key")


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY])
async def test_other_forms_of_authorization_are_no_key(guarded: FastAPI, authorization: str):
    async with http_to(guarded) as http:
        answer = await http.get("/v1/jobs", headers={"Authorization": authorization})
    assert (answer.status_code, error_of(answer)["code"]) == (401, "missing_key")


@pytest.mark.parametrize("key", [KEY, "another-key"])
async def test_every_configured_key_opens(guarded: FastAPI, key: str):
    async with http_to(guarded, host="api.example", key=key) as http:
        assert (await http.post("/v1/jobs", json=SPEC)).status_code == 201


async def test_keys_are_never_logged(guarded: FastAPI, capsys: pytest.CaptureFixture[str]):
    async with http_to(guarded, key=KEY) as http:
        await http.post("/v1/jobs", json=SPEC)
        await http.post("/v1/jobs", json=SPEC, headers={"Authorization": f"Bearer {KEY}x"})
    logged = "".join(capsys.readouterr())
    assert "POST" in logged
    assert KEY not in logged


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:8000", "[::1]:8000"])
async def test_without_keys_programs_of_this_machine_may_ask(app: FastAPI, host: str):
    async with http_to(app, host=host) as http:
        assert (await http.get("/v1/jobs")).status_code == 200


@pytest.mark.parametrize("host", ["rebound.example", "127.0.0.1.example", "localhost.example:8000", "10.0.0.1", "[::2"])
async def test_names_that_only_point_to_this_machine_are_refused_without_keys(app: FastAPI, host: str):
    async with http_to(app) as http:
        answer = await http.post("/v1/jobs", json=SPEC, headers={"Host": host})
    assert (answer.status_code, error_of(answer)["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("origin", ["http://page.example", "null", "http://127.0.0.1:9", "http://[", "127.0.0.1"])
async def test_pages_of_other_origins_are_refused(app: FastAPI, origin: str):
    async with http_to(app) as http:
        answer = await http.get("/v1/jobs", headers={"Origin": origin})
        assert (answer.status_code, error_of(answer)["code"]) == (403, "origin_not_allowed")
        assert (await http.get("/v1/jobs", headers={"Origin": "http://127.0.0.1"})).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "api.example", ""])
def test_addresses_that_others_reach_need_keys(host: str):
    with pytest.raises(AccessRefused, match="GSPO_API_KEYS"):
        require_safe_bind(host, Access())
    require_safe_bind(host, Access([KEY]))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_none(host: str):
    require_safe_bind(host, Access())


def test_a_process_without_keys_refuses_to_start_on_all_addresses(redis_server: RedisServer):
    with ApiProcess(redis_server.url, GSPO_API_HOST="0.0.0.0") as api:
        status, lines = api.end()
    assert status == 2
    assert len(lines) == 1
    assert "GSPO_API_HOST=0.0.0.0" in lines[0]
    assert "Set GSPO_API_KEYS, or bind 127.0.0.1" in lines[0]


async def test_a_key_that_has_ended_does_not_open_what_it_closed(store: Store, tmp_path: Path):
    now = [1000.0]
    ring = KeyRing(KeysDir(tmp_path / "keys"), now=lambda: now[0])
    record, key = ring.issue("alice", ["admin"], lifetime_s=60.0)
    async with application(store, ring=ring) as app:
        async with http_to(app, key=key) as http:
            assert (await http.get("/v1/jobs")).status_code == 200
        now[0] += 61.0
        for end in (lambda: None, lambda: ring.revoke(record.id)):
            end()
            async with http_to(app) as http:
                answer = await http.get("/v1/jobs")
            assert (answer.status_code, error_of(answer)["code"]) == (401, "missing_key")
    with pytest.raises(AccessRefused):
        require_safe_bind("0.0.0.0", Access(ring=ring))


def test_a_process_that_others_reach_never_opens(redis_server: RedisServer, tmp_path: Path):
    ring = KeyRing(KeysDir(tmp_path / "keys"))
    record, _ = ring.issue("alice", ["admin"])
    with ApiProcess(redis_server.url, GSPO_API_HOST="0.0.0.0", GSPO_DATA_DIR=str(tmp_path)) as api:
        url = api.url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(base_url=url, headers={"Host": "localhost"}, trust_env=False) as http:
            assert http.get("/v1/jobs").status_code == 401
            ring.revoke(record.id)
            assert http.get("/v1/jobs").status_code == 401
            shutil.rmtree(tmp_path / "keys")
            assert http.get("/v1/jobs").status_code == 401


def test_a_process_with_keys_serves_all_addresses_to_who_has_one(redis_server: RedisServer):
    with ApiProcess(redis_server.url, GSPO_API_HOST="0.0.0.0", GSPO_API_KEYS=f"x, {KEY}") as api:
        url = api.url.replace("0.0.0.0", "127.0.0.1")
        with httpx.Client(base_url=url, trust_env=False) as http:
            assert http.get("/v1/jobs").status_code == 401
            assert http.get("/v1/jobs", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
