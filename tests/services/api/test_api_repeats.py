"""Every POST may be sent again under its key: one effect, one answer, whichever answers were lost on the way."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gspo_core.log.records import AcceptedJob
from gspo_core.position import Position
from gspo_core.types import EpisodeKey, Group, Split, Trajectory
from gspo_core.versions import WeightFile, WeightsManifest
from services.api.http.key_ring import KeyRing
from services.api.http.repeats import OWN_WAY
from services.files.batch_log import BatchLog
from services.files.data_dir import EnvironmentsDir, KeysDir
from services.files.environments.registry import EnvironmentRegistry
from services.files.job_dir import JobDir, step_name
from services.files.job_records import JobRecords
from services.hosts.local import LocalHosts
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.cancelling import cancel_all
from services.rollout.request_runner import RequestRunner
from services.state.fleet_records import EngineRecord, WorkerRecord
from services.state.functions import Functions
from services.state.kept_replies import KEPT_S, LEASE_S, KeptReplies
from services.state.keys import job_key
from services.state.loans import Loans
from services.state.process_requests import WorkerRequests
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.core.segments import episode
from tests.core.test_model_files import SOUND, write_files
from tests.patience import HANG_S
from tests.services.api.api_kit import SPEC, ApiProcess, application, error_of, http_to

NUM_REPEATS = 100
LEASE = "0" * 32
TOLD = b'{"task": {}, "base_url": "http://gateway/v1", "api_key": "ep_1", "model": "policy"}'
ADMIN = "an-admin-key"
ENV = {"name": "sums", "source": {"type": "reference", "ref": "environments.calculator:Calculator"}}
TRIAL = {"turns": [{"text": "42"}]}
PUSHED = {
    "group": 0,
    "member": 2,
    "token_ids": [1, 2],
    "mask": [False, True],
    "logprobs": [0, -1],
    "policy_versions": 0,
}
FACADE = {"model": "m", "training_file": "env:environments.calculator:Calculator"}
MINE = b"class Mine:\n    pass\n"

# One of each kind: what is sent, and where. `{job}` has a checkpoint, `sums` is registered, the processes are there.
POSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/jobs": ("/v1/jobs", {"json": SPEC}),
    "/v1/jobs/{id}/pause": ("/v1/jobs/{job}/pause", {}),
    "/v1/jobs/{id}/resume": ("/v1/jobs/{job}/resume", {}),
    "/v1/jobs/{id}/fork": ("/v1/jobs/{job}/fork", {"json": {"step": 0}}),
    "/v1/jobs/{id}/retrain": ("/v1/jobs/{job}/retrain", {"json": {}}),
    "/v1/jobs/{id}/replays": ("/v1/jobs/{job}/replays", {"json": {"first": 1}}),
    "/v1/jobs/{id}/cancel": ("/v1/jobs/{job}/cancel?mode=drain", {}),
    "/v1/jobs/{id}/trajectories": ("/v1/jobs/{job}/trajectories", {"json": {"trajectories": [PUSHED]}}),
    "/v1/jobs/{id}/environments/{index}/description": (
        "/v1/jobs/{job}/environments/0/description",
        {"json": {"num_tasks": {"train": 5}}},
    ),
    "/v1/jobs/{id}/talk_keys": ("/v1/jobs/{job}/talk_keys", {}),
    "/v1/jobs/{id}/episodes:lease": ("/v1/jobs/{job}/episodes:lease", {}),
    "/v1/jobs/{id}/leases/{lease}/extend": (f"/v1/jobs/{{job}}/leases/{LEASE}/extend", {}),
    "/v1/jobs/{id}/leases/{lease}/finish": (f"/v1/jobs/{{job}}/leases/{LEASE}/finish?reward=0.5", {}),
    "/v1/jobs/{id}/leases/{lease}/release": (f"/v1/jobs/{{job}}/leases/{LEASE}/release", {}),
    "/v1/checkpoints/{job}/{epoch}/{step}/export": ("/v1/checkpoints/{job}/1/10/export", {}),
    "/v1/environments": ("/v1/environments", {"json": {**ENV, "name": "other"}}),
    "/v1/environments/uploads": (
        "/v1/environments/uploads?name=mine&ref=mine.py:Mine",
        {"content": MINE, "headers": {"Content-Type": "text/x-python"}},
    ),
    "/v1/environments/{environment}/validate": ("/v1/environments/sums/validate", {}),
    "/v1/environments/{environment}/try": ("/v1/environments/sums/try", {"json": TRIAL}),
    "/v1/workers/{worker}/drain": ("/v1/workers/worker-0/drain", {}),
    "/v1/engines/{engine}/drain": ("/v1/engines/http://engine-0/drain", {}),
    "/v1/keys": ("/v1/keys?owner=me", {}),
    "/v1/fine_tuning/jobs": ("/v1/fine_tuning/jobs", {"json": FACADE}),
    "/v1/fine_tuning/jobs/{id}/pause": ("/v1/fine_tuning/jobs/{job}/pause", {}),
    "/v1/fine_tuning/jobs/{id}/resume": ("/v1/fine_tuning/jobs/{job}/resume", {}),
    "/v1/fine_tuning/jobs/{id}/cancel": ("/v1/fine_tuning/jobs/{job}/cancel", {}),
}


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(KeysDir(tmp_path / "keys"))


@pytest.fixture
async def app(store: Store, jobs_dir: Path, ring: KeyRing) -> AsyncIterator[FastAPI]:
    async with application(store, jobs_dir=jobs_dir, may_upload=True, keys=[ADMIN], ring=ring) as app:
        yield app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with http_to(app, key=ADMIN) as http:
        http.timeout = httpx.Timeout(120)
        yield http


@pytest.fixture
async def job(
    http: httpx.AsyncClient, store: Store, bus: Bus, jobs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """That a trainer has; with a checkpoint, a batch log, an open group, an environment and a worker beside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", SPEC["model"]):  # the worker sees the models that jobs name
        (tmp_path / name).mkdir()
        write_files(tmp_path / name, SOUND | {"vocab_size": 10})
    job = str((await http.post("/v1/jobs", json=SPEC | {"model": str(tmp_path / "model")})).json()["id"])
    claim = await store.jobs.claim("trainer-0")
    assert claim
    assert await store.versions.next(job, claim.token) == 0
    await store.versions.publish(job, claim.token, WeightsManifest(job, 0, 1, 0, (WeightFile("w", 1, "0" * 64),)))
    await bus.dispatch(job, claim.token, 0, size=3, split=Split.TRAIN, task_index=0)
    token = await bus.join("gateway-0")
    loans = Loans(Functions(bus._redis))
    for lease in await bus.lease(job, "gateway-0", token, 2):
        await loans.offer(lease.key, token, 0, TOLD)
    await loans.lend(job, LEASE, 60)
    record = await store.jobs.get(job)
    JobRecords(JobDir(jobs_dir / job)).accept(AcceptedJob(record.spec, "0" * 64, record.created_at))
    path = JobDir(jobs_dir / job).checkpoints / step_name(Position(1, 10))
    path.mkdir(parents=True)
    (path / "manifest.json").write_bytes(b"{}")
    played = Trajectory(episode(EpisodeKey(job, 0, 0), [4]))
    BatchLog(JobDir(jobs_dir / job)).write(1, 1, [Group(job, 0, Split.TRAIN, 0, 1, (played,))], {"staleness": {}})
    await store.fleet.register_worker(WorkerRecord(id="worker-0"))
    await store.fleet.register_engine(EngineRecord(id="http://engine-0", url="http://engine-0"))
    await http.post("/v1/environments", json=ENV)
    return job


@pytest.fixture
async def worker(bus: Bus, jobs_dir: Path, tmp_path: Path) -> AsyncIterator[None]:
    sites = Sites(EnvironmentRegistry(EnvironmentsDir(jobs_dir.parent / "environments")))
    runner = RequestRunner(WorkerRequests(bus._redis), sites, LocalHosts(Interpreters(tmp_path / "venvs")), "worker-0")
    running = asyncio.create_task(runner.run())
    yield
    await cancel_all([running])


class Effects:
    """Everything that a POST can change, counted."""

    def __init__(self, app: FastAPI, store: Store, ring: KeyRing, jobs_dir: Path, job: str) -> None:
        self._store, self._ring, self._job = store, ring, job
        self._registry = EnvironmentRegistry(EnvironmentsDir(jobs_dir.parent / "environments"))
        context = app.state.context
        self.num_worker_requests = self.num_exports = self.num_replays = self.num_wishes = 0
        send, wish = context.worker_requests.send, context.store.jobs.set_desired_state

        async def counted_send(*args: Any, **options: Any) -> str:
            self.num_worker_requests += 1
            answer: str = await send(*args, **options)
            return answer

        async def counted_begin(*args: Any) -> None:
            self.num_exports += 1

        def counted_replay(*args: Any) -> None:
            self.num_replays += 1

        async def counted_wish(*args: Any) -> Any:
            self.num_wishes += 1
            return await wish(*args)

        context.worker_requests.send, context.exports.begin = counted_send, counted_begin
        context.store.jobs.set_desired_state = counted_wish
        context.replays.begin = counted_replay

    async def seen(self) -> dict[str, Any]:
        return {
            "jobs": len(await self._store.jobs.page(1000)),
            "keys": len(self._ring.valid()),
            "environments": [one.id for one in self._registry.all()],
            "events": [(one.type, one.data) for one in await self._store.events.read(self._job, count=1000)],
            "wishes": self.num_wishes,
            "errands": self.num_worker_requests,
            "offers": list((await Loans(self._store._functions).offers(self._job)).values()),
            "talk keys": await self._store._functions.redis.hlen(job_key(self._job, "talk_keys")),
            "segments": await self._store._functions.redis.xlen(job_key(self._job, "segments")),
            "description": await self._store.environments.get(self._job, 0),
            "exports": self.num_exports,
            "replays": self.num_replays,
            "drains": await self._store._functions.redis.hlen("gspo:{service}:drains"),
            "engine drains": await self._store._functions.redis.hlen("gspo:{service}:engine_drains"),
        }


def test_the_table_names_every_post(app: FastAPI):
    there = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
    assert there == set(POSTS)


def test_the_document_says_so_of_every_post(app: FastAPI):
    for path in POSTS:
        operation = app.openapi()["paths"][path]["post"]
        names = [one["name"].lower() for one in operation["parameters"]]
        assert names.count("idempotency-key") == 1, path
        assert "409" in operation["responses"], path


@pytest.mark.parametrize("route", POSTS)
async def test_a_hundred_repeats_with_lost_answers_have_one_effect(
    route: str,
    app: FastAPI,
    http: httpx.AsyncClient,
    store: Store,
    ring: KeyRing,
    jobs_dir: Path,
    job: str,
    worker: None,
):
    path, request = POSTS[route]
    request = {**request, "headers": {**request.get("headers", {}), "Idempotency-Key": "the-one"}}
    effects = Effects(app, store, ring, jobs_dir, job)
    before = await effects.seen()
    generator = random.Random(7)

    async def send() -> httpx.Response | None:
        answer = await http.post(path.replace("{job}", job), **request)
        return None if generator.random() < 0.7 else answer  # the others are lost

    first = [await send() for _ in range(3)]
    once = await effects.seen()
    answers = [*first, *await asyncio.gather(*(send() for _ in range(NUM_REPEATS - 4))), await send()]
    assert await effects.seen() == once
    assert once != before
    last = await http.post(path.replace("{job}", job), **request)
    arrived = [one for one in answers if one is not None]
    assert len(arrived) > 10
    assert {(one.status_code, one.text) for one in arrived} == {(last.status_code, last.text)}
    assert last.status_code < 300
    assert last.headers["idempotent-replayed"] == "true" or route in OWN_WAY


async def test_another_request_under_the_same_key_is_a_conflict(http: httpx.AsyncClient, job: str, ring: KeyRing):
    key = {"Idempotency-Key": "k"}
    assert (await http.post("/v1/keys?owner=me", headers=key)).status_code == 201
    for path in ("/v1/keys?owner=you", "/v1/keys", f"/v1/jobs/{job}/pause"):
        answer = await http.post(path, headers=key)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "idempotency_conflict")
        assert answer.headers["x-should-retry"] == "false"
    changed = {**ENV, "name": "other"}
    assert (await http.post("/v1/environments", json=changed, headers={"Idempotency-Key": "e"})).status_code == 201
    answer = await http.post("/v1/environments", json=ENV, headers={"Idempotency-Key": "e"})
    assert error_of(answer)["code"] == "idempotency_conflict"
    assert len(ring.valid()) == 1


async def test_keys_of_different_callers_do_not_meet(app: FastAPI, job: str, ring: KeyRing):
    scopes = ["jobs:read", "jobs:write", "envs:write"]
    for number in range(2):
        _, secret = ring.issue(f"owner-{number}", scopes, None)
        async with http_to(app, key=secret) as theirs:
            body = {**ENV, "name": f"mine-{number}"}
            answer = await theirs.post("/v1/environments", json=body, headers={"Idempotency-Key": "k"})
            assert answer.status_code == 201, answer.text


async def test_what_was_refused_may_be_right_later(http: httpx.AsyncClient):
    key = {"Idempotency-Key": "k"}
    assert (await http.post("/v1/environments/sums/try", json=TRIAL, headers=key)).status_code == 404
    assert (await http.post("/v1/environments", json=ENV, headers=key)).status_code == 201


@pytest.mark.parametrize("key", ["", " ", "x" * 256, "\x7f"])
async def test_what_is_no_key_is_refused(http: httpx.AsyncClient, key: str, job: str):
    answer = await http.post(f"/v1/jobs/{job}/pause", headers={"Idempotency-Key": key})
    assert (answer.status_code, error_of(answer)["code"]) == (422, "validation_failed")


async def test_a_secret_is_answered_again_by_who_has_it_and_kept_nowhere(
    app: FastAPI, http: httpx.AsyncClient, store: Store, jobs_dir: Path, ring: KeyRing
):
    key = {"Idempotency-Key": "k"}
    made = (await http.post("/v1/keys", headers=key)).json()
    assert (await http.post("/v1/keys", headers=key)).json() == made
    held = await store._functions.redis.hgetall("gspo:{service}:replies")
    assert len(held) == 1
    assert made["key"].rpartition("_")[2].encode() not in b"".join(held.values())
    async with (
        application(store, jobs_dir=jobs_dir, keys=[ADMIN], ring=ring) as other,
        http_to(other, key=ADMIN) as elsewhere,
    ):
        answer = await elsewhere.post("/v1/keys", headers=key)
        assert (answer.status_code, error_of(answer)["code"]) == (409, "answer_not_kept")
    assert len(ring.valid()) == 1


async def test_two_processes_do_it_once(store: Store, jobs_dir: Path, ring: KeyRing):
    async with (
        application(store, jobs_dir=jobs_dir, keys=[ADMIN], ring=ring) as one,
        application(store, jobs_dir=jobs_dir, keys=[ADMIN], ring=ring) as two,
        http_to(one, key=ADMIN) as first,
        http_to(two, key=ADMIN) as second,
    ):
        headers = {"Idempotency-Key": "k"}
        posts = [
            http.post("/v1/environments", json=ENV, headers=headers) for _ in range(25) for http in (first, second)
        ]
        answers = await asyncio.gather(*posts)
        assert {answer.status_code for answer in answers} == {201}
        assert sum("idempotent-replayed" in answer.headers for answer in answers) == 49


def test_a_hundred_clients_that_hang_up_at_once_make_one_key(redis_server: RedisServer, store: Store, tmp_path: Path):
    """Over real connections, closed before the answer can come."""
    with ApiProcess(redis_server.url, GSPO_API_KEYS=ADMIN) as api:
        port = int(api.url.rpartition(":")[2])
        head = f"POST /v1/keys?owner=me HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {ADMIN}\r\n"
        head += "Idempotency-Key: the-one\r\nContent-Length: 0\r\n\r\n"
        for _ in range(NUM_REPEATS):
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(head.encode())
        with httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=HANG_S) as http:
            made = http.post("/v1/keys?owner=me", headers={"Idempotency-Key": "the-one"})
            assert made.status_code == 201
            assert [one["id"] for one in http.get("/v1/keys").json()["data"]] == [made.json()["id"]]


# What is kept


async def test_who_falls_silent_loses_the_work_and_keeps_no_answer(bus: Bus):
    now = [1000.0]
    replies = KeptReplies(bus._redis, lambda: now[0])
    assert await replies.begin("n", "r", "a") is None
    begun = await replies.begin("n", "r", "b")
    assert begun is not None
    assert begun.reply is None
    now[0] += LEASE_S - 1
    await replies.renew("n", "a")
    now[0] += LEASE_S - 1
    assert await replies.begin("n", "r", "b") is not None
    now[0] += 2
    assert await replies.begin("n", "r", "b") is None
    await replies.keep("n", "r", "a", b"late")
    await replies.keep("n", "r", "b", b"mine")
    begun = await replies.begin("n", "r", "c")
    assert begun is not None
    assert begun.reply == b"mine"


async def test_answers_end_with_their_time_and_are_bounded_in_bytes(bus: Bus):
    now = [1e9]
    replies = KeptReplies(bus._redis, lambda: now[0])
    redis: Any = bus._redis
    held, meta = "gspo:{service}:replies", "gspo:{service}:replies_held"
    for number in range(300):
        now[0] += 1
        await replies.begin(f"n{number}", "r", "a")
        await replies.keep(f"n{number}", "r", "a", b"x" * 256 * 1024)
    kept = await redis.hgetall(held)
    assert sum(map(len, kept.values())) == int(await redis.hget(meta, "bytes")) < 65 * 1024 * 1024
    assert b"n299" in kept
    assert b"n0" not in kept
    now[0] += KEPT_S + 400
    for _ in range(4):
        await replies.begin("another", "r", "a")
    assert list(await redis.hgetall(held)) == [b"another"]


async def test_an_answer_that_cannot_be_kept_now_is_no_answer(http: httpx.AsyncClient, app: FastAPI, job: str):
    """Else the same request again would be done again although its answer had come."""
    context = app.state.context

    async def fail(*args: Any) -> None:
        raise ConnectionError("gone")

    keep = context.replies.keep
    context.replies.keep = fail
    answer = await http.post(f"/v1/jobs/{job}/pause", headers={"Idempotency-Key": "k"})
    context.replies.keep = keep
    assert answer.status_code >= 500
    assert json.loads(answer.text)["error"]["code"] in ("internal", "redis_unavailable")
