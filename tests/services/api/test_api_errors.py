"""Every error has the one shape, whoever finds it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.api.http.requests import MAX_BODY_BYTES
from services.state.client import RedisClient
from services.state.fleet_records import MIN_UNHEARD, WorkerRecord
from services.state.jobs import JobStatus
from services.state.server import RedisServer, connect
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import JSON, SPEC, application, error_of, http_to


@pytest.fixture
async def http(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store) as app, http_to(app) as http:
        yield http


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "code"),
    [
        ("GET", "/nothing", 404, "not_found_error", "route_not_found"),
        ("GET", "/v1/jobs/", 404, "not_found_error", "route_not_found"),
        ("GET", "/v1/jobs/job_1/nothing", 404, "not_found_error", "route_not_found"),
        ("GET", "/redoc", 404, "not_found_error", "route_not_found"),
        ("DELETE", "/v1/jobs", 405, "invalid_request_error", "method_not_allowed"),
        ("POST", "/healthz", 405, "invalid_request_error", "method_not_allowed"),
        ("GET", "/v1/jobs/job_1", 404, "not_found_error", "job_not_found"),
        ("GET", "/v1/jobs/a%7Bb%7D", 404, "not_found_error", "job_not_found"),
        ("GET", "/v1/jobs/job_1/config", 404, "not_found_error", "job_not_found"),
        ("GET", "/v1/jobs/job_1/events", 404, "not_found_error", "job_not_found"),
        ("GET", "/v1/jobs/job_1/metrics", 404, "not_found_error", "job_not_found"),
        ("POST", "/v1/jobs/job_1/cancel", 404, "not_found_error", "job_not_found"),
        ("POST", "/v1/jobs/%7B%7D/cancel", 404, "not_found_error", "job_not_found"),
    ],
)
async def test_what_is_not_there_is_told_in_the_one_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int, kind: str, code: str
):
    answer = await http.request(method, path)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)
    assert error["message"]


async def test_wrong_methods_are_told_the_right_ones(http: httpx.AsyncClient):
    assert (await http.delete("/v1/jobs/job_1/config")).headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "line 1, column 2"),
        (b'{"model": "m",}', "line 1, column 15"),
        (b'{"model": "m", "model": "n"}', "'model' occurs twice"),
        (b'{"steps": NaN}', "NaN is not a JSON number"),
        (b'{"steps": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"steps": 1e999}', "1e999 is too large"),
        (b'{"steps": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 100 + b"]" * 100, "nested deeper"),
        (b"[" * 500_000, "nested deeper"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "the body is empty"),
    ],
)
async def test_bodies_that_are_no_strict_json_are_400(http: httpx.AsyncClient, body: bytes, said: str):
    answer = await http.post("/v1/jobs", content=body, headers=JSON)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
    assert said in error_of(answer)["message"]


@pytest.mark.parametrize(
    "body",
    [
        rb'{"\ud800": 1}',
        rb'{"model": "\uD800"}',
        rb'{"metadata": {"a": "\udfff"}}',
        rb'{"model": "m", "environments": [{"ref": "a:B", "config": {"x": ["\ud83d"]}}]}',
    ],
)
async def test_lone_surrogates_are_refused_wherever_they_stand(http: httpx.AsyncClient, body: bytes):
    answer = await http.post("/v1/jobs", content=body, headers=JSON)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
    assert "surrogate" in error_of(answer)["message"]


async def test_a_pair_of_surrogates_is_one_character(http: httpx.AsyncClient):
    whole = json.dumps(SPEC | {"name": "\U0001f600"}).encode()
    assert rb"\ud83d\ude00" in whole
    answer = await http.post("/v1/jobs", content=whole, headers=JSON)
    assert (answer.status_code, answer.json()["name"]) == (201, "\U0001f600")


async def test_a_job_that_was_stored_with_half_a_character_is_shown_without_it(http: httpx.AsyncClient, store: Store):
    entry = SPEC["environments"][0] | {"config": {"x\ud800": ["\ud83d", 1]}}
    job = (await store.jobs.create(json.dumps(SPEC | {"environments": [entry]}))).id
    config = (await http.get(f"/v1/jobs/{job}/config")).json()["config"]
    assert config["environments"][0]["config"] == {"x?": ["?", 1]}
    assert (await http.get(f"/v1/jobs/{job}/environments")).json()["data"][0]["config"] == {"x?": ["?", 1]}


@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_that_are_too_large_are_413_declared_or_not(http: httpx.AsyncClient, declared: bool):
    body = json.dumps(SPEC | {"name": "x" * MAX_BODY_BYTES}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    answer = await http.post("/v1/jobs", content=body if declared else pieces(), headers=JSON)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "body_too_large")


async def test_reading_stops_where_a_body_becomes_too_large(http: httpx.AsyncClient):
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b" " * (1 << 16)

    assert (await http.post("/v1/jobs", content=endless(), headers=JSON)).status_code == 413
    assert sent <= MAX_BODY_BYTES + 2 * (1 << 16)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_other_kinds_of_bodies_are_415(http: httpx.AsyncClient, kind: str):
    answer = await http.post("/v1/jobs", content=json.dumps(SPEC), headers={"Content-Type": kind})
    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_may_be_declared_in_all_its_spellings(http: httpx.AsyncClient, kind: str):
    answer = await http.post("/v1/jobs", content=json.dumps(SPEC), headers={"Content-Type": kind})
    assert answer.status_code == 201


class BrokenStore(Store):
    """Fails in a way that nobody expects."""

    def __init__(self, redis: RedisClient) -> None:
        super().__init__(redis)
        self.jobs.get = self._fail  # type: ignore[method-assign]

    async def _fail(self, job: str) -> Any:
        raise ZeroDivisionError("the secret of the inside")


async def test_failures_of_ours_are_500_and_tell_nothing_of_the_inside(
    redis_client: RedisClient, capsys: pytest.CaptureFixture[str]
):
    async with application(BrokenStore(redis_client)) as app, http_to(app) as http:
        answer = await http.get("/v1/jobs/job_1")
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["code"]) == (500, "api_error", "internal")
    assert "secret" not in answer.text
    logged = "".join(capsys.readouterr())
    assert "the secret of the inside" in logged
    assert error["request_id"] in logged


@pytest.fixture
def own_redis(tmp_path: Path) -> RedisServer:
    return RedisServer.spawn(tmp_path)


def impatient(url: str) -> RedisClient:
    return RedisClient.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0))


async def test_without_redis_every_route_answers_503_and_comes_back(own_redis: RedisServer, tmp_path: Path):
    async with impatient(own_redis.url) as client, application(Store(client)) as app, http_to(app) as http:
        job = (await http.post("/v1/jobs", json=SPEC)).json()
        own_redis.close()
        for request in (
            http.get("/v1/jobs"),
            http.post("/v1/jobs", json=SPEC),
            http.get(job["links"]["self"]),
            http.get(job["links"]["events"]),
            http.get(job["links"]["events"], headers={"Accept": "text/event-stream"}),
            http.get(job["links"]["metrics"]),
            http.get("/v1/workers"),
            http.get("/readyz"),
        ):
            answer = await request
            error = error_of(answer)
            assert (answer.status_code, error["type"], error["code"]) == (
                *(503, "unavailable_error", "redis_unavailable"),
            )
            assert answer.headers["retry-after"] == "1"
            assert error["retry_after_s"] == 1.0
        assert (await http.get("/healthz")).status_code == 200
        with RedisServer.spawn(tmp_path):
            assert (await http.get(job["links"]["self"])).json()["id"] == job["id"]
            assert (await http.get("/readyz")).status_code == 200


async def test_a_redis_that_is_full_is_503_and_takes_the_same_request_when_there_is_room(
    own_redis: RedisServer, tmp_path: Path
):
    key = {"Idempotency-Key": "k"}
    async with impatient(own_redis.url) as client, application(Store(client)) as app, http_to(app) as http:
        job = (await http.post("/v1/jobs", json=SPEC)).json()
        await client.config_set("maxmemory", 1)
        for path, body in (("/v1/jobs", {"json": SPEC}), (job["links"]["pause"], {})):
            answer = await http.post(path, headers=key, **body)
            error = error_of(answer)
            assert (answer.status_code, error["type"], error["code"]) == (503, "unavailable_error", "redis_full")
            assert answer.headers["retry-after"] == "1"
        await client.config_set("maxmemory", 0)
        assert (await http.post("/v1/jobs", json=SPEC, headers=key)).status_code == 201


async def test_a_body_of_very_many_mistakes_is_answered_soon_and_shortly(http: httpx.AsyncClient):
    """As many as fit. Each was compared with each of the others, and nobody else was answered for minutes."""
    wrong = {f"k{number}": 0 for number in range(60_000)}
    for path, body in (("/v1/jobs", SPEC | wrong), ("/v1/jobs", SPEC | {"sampling": wrong})):
        async with asyncio.timeout(HANG_S):
            answer = await http.post(path, json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (422, "unknown_field")
        assert len(error_of(answer)["errors"]) == 100
    query = "&".join(f"k{number}=0" for number in range(3000))
    answer = await http.get(f"/v1/jobs?{query}")
    assert (answer.status_code, len(error_of(answer)["errors"])) == (422, 100)


async def test_readiness_answers_soon_although_the_client_would_try_for_long(own_redis: RedisServer):
    client = connect(own_redis.url)
    try:
        async with application(Store(client)) as app, http_to(app) as http:
            assert (await http.get("/readyz")).status_code == 200
            own_redis.close()
            async with asyncio.timeout(5):
                answer = await http.get("/readyz")
            assert error_of(answer)["code"] == "redis_unavailable"
    finally:
        await client.aclose()


async def test_ready_names_what_is_missing_elsewhere(http: httpx.AsyncClient):
    answer = await http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ready", "degraded": ["no rollout worker is running: jobs wait"]}


async def test_ready_says_that_agents_have_no_gateway_or_do_not_reach_it(http: httpx.AsyncClient, store: Store):
    await store.fleet.register_worker(WorkerRecord(id="rollout-1"))
    assert (await http.get("/readyz")).json()["degraded"] == []
    await store.jobs.create(json.dumps({"environments": [{"ref": "a.py:run", "agent": {}}]}))
    claim = await store.jobs.claim("trainer")
    assert claim is not None
    await store.jobs.set_status(claim.job_id, JobStatus.RUNNING, token=claim.token)
    assert (await http.get("/readyz")).json()["degraded"] == ["no gateway is running: jobs of agents wait"]
    await store.fleet.register_worker(WorkerRecord(id="gateway-1", kind="gateway"))
    assert (await http.get("/readyz")).json()["degraded"] == []
    unheard = {"agents/asked_nothing": MIN_UNHEARD}
    await store.fleet.register_worker(WorkerRecord(id="gateway-1", kind="gateway", counters=unheard))
    [said] = (await http.get("/readyz")).json()["degraded"]
    assert said.startswith("agents end without a request: can they reach the gateway under GSPO_GATEWAY_URL?")
    assert "gateway-1" in said


async def test_every_answer_carries_a_request_id_of_its_own(http: httpx.AsyncClient):
    ids = [(await http.get(path)).headers["x-request-id"] for path in ("/healthz", "/v1/jobs", "/v1/jobs", "/nothing")]
    assert len(set(ids)) == 4
    assert ids == sorted(ids)


async def test_every_answer_is_for_its_caller_alone_and_what_it_says_it_is(http: httpx.AsyncClient):
    for path in ("/healthz", "/v1/jobs", "/v1/jobs/missing", "/nothing", "/v1/info"):
        headers = (await http.get(path)).headers
        assert headers.get_list("x-content-type-options") == ["nosniff"], path
        assert headers.get_list("cache-control") == ["private, no-cache"], path
    page = (await http.get("/ui/")).headers
    assert page.get_list("cache-control") == ["no-cache"]
    assert page.get_list("x-content-type-options") == ["nosniff"]


async def test_the_openapi_document_describes_requests_answers_and_errors(http: httpx.AsyncClient):
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    bare = [
        f"{name}.{field}"
        for name in ("SubmittedSpec", "RolloutSpec", "Limits", "ObjectiveConfig", "OptimizerConfig", "EnvironmentSpec")
        for field, shape in schemas[name]["properties"].items()
        if not shape.get("description")
    ]
    assert not bare
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            assert route["description"], (method, path)
            if path.startswith("/v1"):
                assert route["security"], (method, path)
                assert "ErrorAnswer" in json.dumps(route["responses"]["422"]), (method, path)


@pytest.mark.parametrize("name", [{}, [], 1])
async def test_a_name_that_is_no_text_is_refused_like_any_other(http: httpx.AsyncClient, name: object):
    answer = await http.post("/v1/jobs?dry_run=true", json=SPEC | {"objective": {"name": name}})
    assert (answer.status_code, error_of(answer)["code"]) == (422, "validation_failed")
