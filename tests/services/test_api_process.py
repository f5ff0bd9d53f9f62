"""`python -m services.api` as a process: it starts, it says why it does not, it stops."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from gspo_core.spec import JobSpec
from services.redis_server import RedisServer
from services.store import Store
from tests.services.api_kit import SPEC, ApiProcess, error_of

STREAM = {"Accept": "text/event-stream"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_stops_soon_although_streams_are_open(redis_server: RedisServer, store: Store, number: signal.Signals):
    job = await store.create_job(JobSpec.model_validate(SPEC))
    with ApiProcess(redis_server.url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=30, trust_env=False) as http:
            streams = [
                await http.send(http.build_request("GET", f"/v1/jobs/{job.id}/events", headers=STREAM), stream=True)
                for _ in range(20)
            ]
            first = [aiter(stream.aiter_lines()) for stream in streams]
            assert [await anext(lines) for lines in first] == ["retry: 2000"] * 20
            started = time.monotonic()
            api.process.send_signal(number)
            status = await asyncio.to_thread(api.process.wait, 30)
            took_s = time.monotonic() - started
            rest = [[line async for line in lines] for lines in first]
        left = api.log()
    assert status == 0
    # Half a second for the streams to notice, and the rest for a machine that is busy.
    assert took_s < 10
    # Every stream ended whole, not cut, and with no end of the job that was none.
    assert all("event: end" not in lines for lines in rest)
    assert not [line for line in left if "Traceback" in line or "error" in line]


async def test_what_was_accepted_is_there_after_a_kill(redis_server: RedisServer, store: Store):
    with ApiProcess(redis_server.url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=30, trust_env=False) as http:
            first = (await http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k"})).json()
        api.process.kill()
        api.process.wait()
    with ApiProcess(redis_server.url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=30, trust_env=False) as http:
            second = (await http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k"})).json()
            assert (await http.get("/v1/jobs")).json()["data"] == [first]
    assert second == first


async def test_it_serves_and_recovers_when_redis_comes_late(tmp_path: Path):
    server = RedisServer.spawn(tmp_path)
    url = server.url
    server.close()
    with ApiProcess(url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=30, trust_env=False) as http:
            assert (await http.get("/healthz")).status_code == 200
            away = await http.get("/readyz")
            assert (away.status_code, error_of(away)["code"]) == (503, "redis_unavailable")
            with RedisServer.spawn(tmp_path):
                async with asyncio.timeout(30):
                    while (await http.get("/readyz")).status_code != 200:
                        await asyncio.sleep(0.05)
                assert (await http.post("/v1/jobs", json=SPEC)).status_code == 201


def test_a_port_that_is_taken_is_named(redis_server: RedisServer):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with ApiProcess(redis_server.url, GSPO_API_PORT=port) as api:
            status, lines = api.end()
    assert status == 2
    assert lines == [
        f"services.api: cannot listen on 127.0.0.1:{port} (GSPO_API_HOST, GSPO_API_PORT): Address already in use"
    ]


def test_a_missing_redis_url_is_named():
    with ApiProcess("") as api:
        status, lines = api.end()
    assert status == 2
    assert len(lines) == 1
    assert "GSPO_REDIS_URL is not set" in lines[0]
