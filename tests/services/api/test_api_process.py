"""`python -m services.api` as a process: it starts, it says why it does not, it stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import sys
import time
from pathlib import Path

import httpx
import pytest

from gspo_core.spec import JobSpec
from services.api.__main__ import GRACE_S, MAX_CONNECTIONS
from services.state.server import RedisServer, connect
from services.state.store import Store
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, ApiProcess, error_of

STREAM = {"Accept": "text/event-stream"}
START = {"Last-Event-ID": "0"}
# More than the kernel holds for a server that does not read.
ENDLESS_BYTES = 64 << 20
UNLIMITED = httpx.Limits(max_connections=None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_stops_soon_although_streams_are_open(redis_server: RedisServer, store: Store, number: signal.Signals):
    """Started as it is everywhere else; those below have imported already what it needs."""
    job = await store.jobs.create(JobSpec.model_validate(SPEC))
    with ApiProcess(redis_server.url, python=sys.executable) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False) as http:
            streams = [
                await http.send(http.build_request("GET", f"/v1/jobs/{job.id}/events", headers=STREAM), stream=True)
                for _ in range(20)
            ]
            first = [aiter(stream.aiter_lines()) for stream in streams]
            assert [await anext(lines) for lines in first] == ["retry: 2000"] * 20
            started = time.monotonic()
            api.process.send_signal(number)
            status = await asyncio.to_thread(api.process.wait, HANG_S)
            took_s = time.monotonic() - started
            rest = [[line async for line in lines] for lines in first]
        left = api.log()
    assert status == 0
    # Half a second for the streams to notice, and the rest for a machine that is busy.
    assert took_s < 10
    # Every stream ended whole, not cut, and with no end of the job that was none.
    assert all("event: end" not in lines for lines in rest)
    assert not [line for line in left if "Traceback" in line or "error" in line]


async def test_what_is_being_asked_when_it_leaves_is_answered(redis_server: RedisServer):
    """Also where that takes longer than the few seconds that it has on a laptop."""
    body = json.dumps(SPEC).encode()
    with ApiProcess(redis_server.url, "--grace-s", "60") as api:
        host, _, port = api.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-1])
        await writer.drain()
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False) as http:
            assert (await http.get("/healthz")).status_code == 200  # after what came before it
        api.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HANG_S):
            while await is_served(host, int(port)):
                await asyncio.sleep(0.02)
            await asyncio.sleep(GRACE_S + 1)  # it must not be cut after this
            writer.write(body[-1:])
            assert (await reader.readline()).split()[1] == b"201"
            writer.close()
            assert await asyncio.to_thread(api.process.wait, HANG_S) == 0


async def is_served(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionError:  # refused, or ended by a listener that was closed in this moment
        return False
    writer.close()
    return True


async def test_what_was_accepted_is_there_after_a_kill(redis_server: RedisServer, store: Store):
    with ApiProcess(redis_server.url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False) as http:
            first = (await http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k"})).json()
        api.process.kill()
        api.process.wait()
    with ApiProcess(redis_server.url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False) as http:
            second = (await http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "k"})).json()
            assert (await http.get("/v1/jobs")).json()["data"] == [first]
    assert second == first


async def test_it_serves_and_recovers_when_redis_comes_late(tmp_path: Path):
    server = RedisServer.spawn(tmp_path)
    url = server.url
    server.close()
    with ApiProcess(url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False) as http:
            assert (await http.get("/healthz")).status_code == 200
            away = await http.get("/readyz")
            assert (away.status_code, error_of(away)["code"]) == (503, "redis_unavailable")
            with RedisServer.spawn(tmp_path):
                async with asyncio.timeout(HANG_S):
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
    with ApiProcess("", python=sys.executable) as api:
        status, lines = api.end()
    assert status == 2
    assert len(lines) == 1
    assert "GSPO_REDIS_URL is not set" in lines[0]


async def test_a_hundred_posts_whose_answers_are_dropped_make_one_job(redis_server: RedisServer, store: Store):
    """Cut by the client at every place: while it writes, at once after, in the middle of the answer."""
    body = json.dumps(SPEC).encode()
    generator = random.Random(7)
    with ApiProcess(redis_server.url) as api:
        host, _, port = api.url.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Idempotency-Key: one-and-only\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()

        async def post_and_drop(number: int) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            whole = head + body
            writer.write(whole if number % 4 else whole[: generator.randrange(len(whole))])
            await writer.drain()
            if number % 4 > 1:
                await reader.read(generator.randint(1, 200))
            if number % 4 == 3:
                writer.transport.abort()
            writer.close()

        for first in range(0, 100, 10):
            await asyncio.gather(*(post_and_drop(number) for number in range(first, first + 10)))
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False) as http:
            last = await http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "one-and-only"})
            jobs = (await http.get("/v1/jobs")).json()["data"]
        assert last.headers["idempotent-replayed"] == "true"
        assert [job["id"] for job in jobs] == [last.json()["id"]]
        assert not [line for line in api.log() if "request failed" in line]


@pytest.mark.parametrize(
    "before", ["", "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"], ids=["headers", "trailers"]
)
async def test_headers_without_end_are_cut_off(redis_server: RedisServer, before: str):
    with ApiProcess(redis_server.url) as api:
        host, _, port = api.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/jobs HTTP/1.1\r\nHost: {host}:{port}\r\n{before}".encode())
        answer = asyncio.create_task(reader.read())
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            while not answer.done() and num_sent < ENDLESS_BYTES:
                writer.write(b"x-more: " + b"y" * 4000 + b"\r\n")
                await writer.drain()
                num_sent += 4010
                await asyncio.sleep(0)
        assert num_sent < ENDLESS_BYTES
        await asyncio.gather(answer, return_exceptions=True)
        writer.close()
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False) as http:
            assert (await http.get("/healthz")).status_code == 200
            long = {**SPEC, "metadata": {f"k{number}": "v" * 400 for number in range(16)}}
            again = await http.post("/v1/jobs", json=long, headers={"x-long": "z" * 60_000})
            assert again.status_code == 201, again.text


async def test_requests_are_not_piled_up_on_one_connection(redis_server: RedisServer):
    """Each that waits for its turn holds a hundred times the memory of its bytes."""
    with ApiProcess(redis_server.url) as api:
        host, _, port = api.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answers = asyncio.create_task(reader.read())
        # Takes longer than reading what follows.
        writer.write(
            f"POST /v1/jobs HTTP/1.1\r\nHost: {host}:{port}\r\n"
            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}".encode()
        )
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode() * 1000)
        received = await asyncio.wait_for(answers, HANG_S)
        assert b"Too many requests are waiting" in received
        assert received.count(b"HTTP/1.1 ") < 200
        writer.close()


async def test_a_request_names_one_host_and_asks_for_no_other_protocol(redis_server: RedisServer):
    with ApiProcess(redis_server.url) as api:
        host, _, port = api.url.removeprefix("http://").partition(":")

        async def status(*lines: str) -> int:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())
            answer = await asyncio.wait_for(reader.readline(), 60)
            writer.close()
            return int(answer.split()[1])

        here, asks = "Host: localhost", "GET /healthz HTTP/1.1"
        assert await status(asks, here) == 200
        assert await status("GET /healthz HTTP/1.0") == 200
        assert await status(asks) == 400
        assert await status(asks, here, "Host: elsewhere.example") == 400
        handshake = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
        assert await status(asks, here, *handshake, "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==") == 200
        assert await status("GET /v1/jobs HTTP/1.1", "Host: elsewhere.example") == 403


async def test_more_readers_than_connections_to_redis_wait_for_their_turn(redis_server: RedisServer, store: Store):
    """Hundreds come at the same moment, as after a restart of the API: none is sent away."""
    job = await store.jobs.create(JobSpec.model_validate(SPEC))
    before = await num_connections(redis_server)
    with ApiProcess(redis_server.url) as api:
        async with httpx.AsyncClient(base_url=api.url, timeout=HANG_S, trust_env=False, limits=UNLIMITED) as http:

            async def first_event() -> str:
                async with http.stream("GET", f"/v1/jobs/{job.id}/events", headers={**STREAM, **START}) as stream:
                    return await anext(line async for line in stream.aiter_lines() if line.startswith("event:"))

            asked = [http.get(f"/v1/jobs/{job.id}") for _ in range(MAX_CONNECTIONS)]
            answers = await asyncio.gather(*asked, *(first_event() for _ in range(MAX_CONNECTIONS)))
            assert {answer.status_code for answer in answers[:MAX_CONNECTIONS]} == {200}
            assert set(answers[MAX_CONNECTIONS:]) == {"event: job.status"}
    assert await num_connections(redis_server) - before < MAX_CONNECTIONS + 20


async def num_connections(redis_server: RedisServer) -> int:
    """That were ever made."""
    async with connect(redis_server.url) as redis:
        return int((await redis.info("stats"))["total_connections_received"])


async def test_a_second_redis_is_not_let_at_a_directory_that_is_served(
    redis_server: RedisServer, server_binary: Path, tmp_path: Path
):
    data = {"GSPO_DATA_DIR": str(tmp_path / "data")}
    with (
        RedisServer.spawn(tmp_path / "redis", binary=server_binary) as other,
        ApiProcess(redis_server.url, **data) as api,
    ):
        assert api.url
        with ApiProcess(other.url, **data) as second:
            status, lines = second.end()
    assert status == 2
    assert any("another Redis serves" in line for line in lines)
