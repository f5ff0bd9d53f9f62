"""The Python client against a real API, through connections that break."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from gspo_core.api_answers import Event
from gspo_core.client import ApiError, Client, ClientError, Unreachable
from gspo_core.server_events import parse_events
from gspo_core.spec import JobSpec
from services.state.jobs import JobStatus
from services.state.server import RedisServer
from services.state.store import Store
from tests.services.api.api_kit import SPEC, ApiProcess

KEY = "gspo_a1_key"


@pytest.fixture(scope="module")
def api(redis_server: RedisServer) -> Iterator[ApiProcess]:
    with ApiProcess(redis_server.url, GSPO_API_KEYS=KEY) as api:
        yield api


@pytest.fixture
def client(api: ApiProcess, store: Store) -> Iterator[Client]:
    with Client(api.url, KEY, sleep=lambda _: None) as client:
        yield client


class CuttingProxy:
    """Forwards to the API and hangs up: on a connection after as many bytes of answer as `allow` says (None: never)."""

    def __init__(self, url: str, allow: Callable[[], int | None]) -> None:
        self._target = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        self._allow = allow
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # A thread that waits in accept wakes up at a shutdown, not at a close.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                self.num_connections += 1
                with caller, socket.create_connection(self._target) as api, contextlib.suppress(OSError):
                    self._forward(caller, api, self._allow())

    def _forward(self, caller: socket.socket, api: socket.socket, left: int | None) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(caller, selectors.EVENT_READ, api)
            waiting.register(api, selectors.EVENT_READ, caller)
            while True:
                for key, _ in waiting.select():
                    data = key.fileobj.recv(1 << 14)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is api and left is not None:
                        data, left = data[:left], left - len(data)
                    key.data.sendall(data)
                    if left is not None and left <= 0:
                        return


async def finished_job(store: Store, num_events: int) -> str:
    job = await store.jobs.create(JobSpec.model_validate(SPEC))
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None
    for step in range(num_events):
        await store.events.add(job.id, "step", {"step": step, "message": "ü" * (step % 50)})
    for status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
        await store.jobs.set_status(job.id, status, token=claim.token)
    return job.id


def test_a_job_from_its_submission_to_its_end(client: Client):
    job = client.create_job(JobSpec.model_validate(SPEC | {"name": "mine"}))
    assert (job["name"], job["status"]) == ("mine", "queued")
    assert client.job(job["id"]) == job
    assert client.config(job["id"])["rollout"]["staleness_cap"] == 16
    assert client.metrics(job["id"]) == []
    assert client.workers() == []
    assert client.cancel(job["id"])["status"] == "cancelled"
    assert [event.type for event in client.events(job["id"])] == ["job.status", "job.status"]


def test_a_plan_creates_nothing(client: Client):
    before = [job["id"] for job in client.jobs()]
    assert client.plan_job(SPEC)["estimate"]["episodes_per_step"] == 64
    assert [job["id"] for job in client.jobs()] == before


def test_jobs_come_newest_first_over_all_pages(client: Client):
    made = [client.create_job(SPEC)["id"] for _ in range(103)]
    assert [job["id"] for job in client.jobs()][:103] == made[::-1]
    assert [job["id"] for job in client.jobs(order="asc")][-103:] == made
    client.cancel(made[5])
    assert next(job["id"] for job in client.jobs(status="cancelled")) == made[5]


async def test_metrics_come_whole_over_all_pages(client: Client, store: Store):
    job = await finished_job(store, 0)
    for step in range(1100):
        await store.metrics.add(job, step, {"reward/mean": float(step), "x": 0.0})
    rows = await asyncio.to_thread(client.metrics, job, 50, names="reward/*")
    assert rows == [{"step": step, "reward/mean": float(step)} for step in range(50, 1100)]


def test_refusals_are_typed(client: Client, api: ApiProcess):
    with pytest.raises(ApiError) as caught:
        client.create_job(SPEC | {"sampling": {"temprature": 1}})
    error = caught.value
    assert (error.status, error.code, error.param) == (422, "unknown_field", "sampling.temprature")
    assert error.message == "sampling.temprature is not a field; did you mean temperature?"
    assert (error.request_id or "").startswith("req_")
    with pytest.raises(ApiError, match="job_not_found"):
        list(client.events("job_1"))
    with pytest.raises(ApiError, match="not_found"):
        client.job("../workers")  # leads nowhere else
    with Client(api.url) as stranger, pytest.raises(ApiError, match="missing_key"):
        list(stranger.jobs())


def test_answers_of_something_else_are_no_riddle():
    transport = httpx.MockTransport(lambda _: httpx.Response(404, text="<html>"))
    with Client(transport=transport) as client, pytest.raises(ApiError, match=r"is .* the API"):
        client.job("job_1")


def test_a_page_of_something_else_is_no_answer():
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>"))
    with Client(transport=transport) as client, pytest.raises(ApiError, match=r"is .* the API"):
        list(client.jobs())


@pytest.mark.parametrize("url", ["http://[", "nonsense", "ftp://127.0.0.1", ""])
def test_what_is_no_address_is_told_at_once(url: str):
    waits: list[float] = []
    with pytest.raises(Unreachable), Client(url, sleep=waits.append) as client:
        client.job("job_1")
    assert waits == []


def test_a_key_is_taken_without_its_line_end_and_one_that_cannot_be_is_refused():
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    with Client(api_key="gspo_a\n", transport=httpx.MockTransport(answer)) as client:
        client.job("job_1")
    assert seen == ["Bearer gspo_a"]
    with pytest.raises(ClientError, match="API key"):
        Client(api_key="gsp\u00f6")


def test_exported_episodes_may_say_anything():
    """Characters that end lines in Python, and not in this format, stand in what policies say."""
    said = [{"id": "a", "text": "one\u2028two\u0085three\u2029"}, {"id": "b", "text": "\u001e\n\r"}]
    body = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in said).encode()

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 3):
            yield body[start : start + 3]

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces()))
    with Client(transport=transport) as client:
        assert list(client.export_episodes("job_1")) == said


def test_nobody_there_is_told_at_once():
    waits: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Client(url, sleep=waits.append) as client:
        with pytest.raises(Unreachable, match=url):
            client.job("job_1")
        with pytest.raises(Unreachable, match=url):
            list(client.events("job_1"))
    assert waits == []


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_api_that_cannot_answer_now_is_asked_again(status: int):
    answers = iter([status, status, 200])
    waits: list[float] = []
    transport = httpx.MockTransport(lambda _: httpx.Response(next(answers), json={"id": "job_1"}))
    with Client(transport=transport, sleep=waits.append) as client:
        assert client.job("job_1") == {"id": "job_1"}
    assert waits == [0.25, 0.5]


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 500])
def test_answers_that_would_not_change_are_taken_at_their_word(status: int):
    calls: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(status, json={"error": {"code": "x", "message": "y"}})

    with Client(transport=httpx.MockTransport(answer)) as client, pytest.raises(ApiError, match=r"y \[x\]"):
        client.cancel("job_1")
    assert len(calls) == 1


def test_a_submission_whose_answer_is_lost_makes_one_job(api: ApiProcess, client: Client):
    before = [one["id"] for one in client.jobs()]
    allowed = iter([10, 0, 200, None])
    with CuttingProxy(api.url, lambda: next(allowed)) as proxy, Client(proxy.url, KEY, sleep=lambda _: None) as far:
        job = far.create_job(SPEC)
    assert proxy.num_connections == 4
    assert [one["id"] for one in client.jobs()] == [job["id"], *before]


async def test_events_come_once_and_in_order_over_connections_that_break_anywhere(api: ApiProcess, store: Store):
    job = await finished_job(store, 300)
    chance = random.Random(3)

    def follow() -> tuple[list[Event], int]:
        with (
            CuttingProxy(api.url, lambda: chance.randrange(1, 4000)) as proxy,
            Client(proxy.url, KEY, sleep=lambda _: None) as client,
        ):
            return list(itertools.islice(client.events(job), 1000)), proxy.num_connections

    seen, num_connections = await asyncio.to_thread(follow)
    listed = await store.events.read(job, "0", count=1000)
    assert [(event.id, event.type, event.data) for event in seen] == [(one.id, one.type, one.data) for one in listed]
    assert len(seen) == 304
    assert num_connections > 10


async def test_events_resume_after_the_one_given(client: Client, store: Store):
    job = await finished_job(store, 3)
    ids = [event.id for event in await store.events.read(job)]
    seen = await asyncio.to_thread(lambda: [event.id for event in client.events(job, after=ids[2])])
    assert seen == ids[3:]


async def test_events_end_in_an_error_when_the_api_stays_away(redis_server: RedisServer, store: Store, api: ApiProcess):
    job = await store.jobs.create(JobSpec.model_validate(SPEC))
    waits: list[float] = []

    def follow() -> None:
        settings = {"GSPO_DATA_DIR": api.data_dir}
        with ApiProcess(redis_server.url, **settings) as away, Client(away.url, sleep=waits.append) as client:
            events = client.events(job.id)
            next(events)
            away.process.kill()
            away.process.wait()
            with pytest.raises(Unreachable):
                next(events)

    await asyncio.to_thread(follow)
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_cut_event_does_not_count():
    lines = [
        "retry: 2000",
        "",
        "id: 1-0",
        "event: step",
        'data: {"a":',
        "data: 1}",
        "",
        ": ping",
        "",
        "id: 2-0",
        "data: {}",
    ]
    assert list(parse_events(lines)) == [Event("1-0", "step", {"a": 1}), None]


@pytest.mark.slow
async def test_a_reader_that_is_killed_again_and_again_sees_all_of_ten_thousand_events_once(
    api: ApiProcess, store: Store
):
    """Connections break anywhere, and the reader itself ends at random and begins anew after the last event it had."""
    total = 9_990  # with the job's states as many as are kept
    job = await store.jobs.create(JobSpec.model_validate(SPEC))
    claim = await store.jobs.claim("trainer-0")
    assert claim is not None

    async def write() -> None:
        for first in range(0, total, 90):
            await asyncio.gather(*(store.events.add(job.id, "log", {"n": first + one}) for one in range(90)))
        for status in (JobStatus.RUNNING, JobStatus.SUCCEEDED):
            await store.jobs.set_status(job.id, status, token=claim.token)

    chance = random.Random(11)
    seen: list[Event] = []
    lives = 0

    def read() -> int:
        nonlocal lives
        with CuttingProxy(api.url, lambda: chance.randrange(1, 120_000)) as proxy:
            while not seen or seen[-1].data.get("status") != "succeeded":
                lives += 1
                with Client(proxy.url, KEY, sleep=lambda _: time.sleep(0.01)) as reader:
                    after = seen[-1].id if seen else "0"
                    seen.extend(itertools.islice(reader.events(job.id, after), chance.randrange(1, 400)))
            return proxy.num_connections

    writing = asyncio.create_task(write())
    num_connections = await asyncio.to_thread(read)
    await writing
    listed = await store.events.read(job.id, "0", count=20_000)
    assert [event.id for event in seen] == [event.id for event in listed]
    assert sorted(event.data["n"] for event in seen if event.type == "log") == list(range(total))
    assert lives > 20
    assert num_connections > lives


def test_a_hundred_repeats_of_one_submission_whose_answers_are_dropped_make_one_job(api: ApiProcess, client: Client):
    before = {one["id"] for one in client.jobs()}
    chance = random.Random(2)
    answers: list[httpx.Response] = []
    with CuttingProxy(api.url, lambda: chance.choice([0, 1, 40, 200, 400, None])) as proxy:
        for _ in range(100):
            headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": "once"}
            with contextlib.suppress(httpx.TransportError), httpx.Client(trust_env=False) as http:
                answers.append(http.post(f"{proxy.url}/v1/jobs", json=SPEC, headers=headers))
    assert 0 < len(answers) < 100
    made = {one["id"] for one in client.jobs()} - before
    assert made == {one.json()["id"] for one in answers}
    assert len(made) == 1
    assert sum("idempotent-replayed" not in one.headers for one in answers) <= 1
