"""Environments over HTTP, with a real rollout worker's requests beside the API: registered, examined, tried,
refused."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.client import ApiError, Client
from gspo_core.env import InvalidEnvironment
from gspo_core.outbound import parse_networks
from services.api.http.key_ring import KeyRing
from services.files.data_dir import UPLOADS, EnvironmentsDir, KeysDir
from services.files.environments.registry import EnvironmentRegistry, ExaminationFinding, Registration
from services.hosts.local import LocalHosts, WallPolicy
from services.hosts.server import HostOrder, RunningHost
from services.hosts.session import HostedEnvironment
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.hosts.walls.tiers import Tier
from services.process.cancelling import cancel_all
from services.process.children import die_with_parent
from services.rollout import request_runner
from services.rollout.request_runner import RequestRunner
from services.state.process_requests import WorkerRequests
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.apparatus.processes import is_running
from tests.apparatus.warm_python import Child
from tests.patience import HANG_S
from tests.services.api.api_kit import GUESS, SPEC, ApiProcess, application, error_of, http_to

REF = "environments.calculator:Calculator"
SUMS: dict[str, Any] = {"name": "sums", "source": {"type": "reference", "ref": REF}}
LOOPBACK = parse_networks(["127.0.0.0/8"])


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def registry(jobs_dir: Path) -> EnvironmentRegistry:
    return EnvironmentRegistry(EnvironmentsDir(jobs_dir.parent / "environments"))


@pytest.fixture
async def http(store: Store, jobs_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    options = {"jobs_dir": jobs_dir, "networks": LOOPBACK, "may_upload": True}
    async with application(store, **options) as app, http_to(app) as http:
        http.timeout = httpx.Timeout(120)
        yield http


@pytest.fixture
async def worker(
    request: pytest.FixtureRequest, bus: Bus, registry: EnvironmentRegistry, tmp_path: Path
) -> AsyncIterator[None]:
    """What a rollout worker does of it, in this process."""
    hosts = LocalHosts(Interpreters(tmp_path / "venvs"), WallPolicy(getattr(request, "param", None)))
    sites = Sites(registry, ("127.0.0.0/8",))
    runner = RequestRunner(WorkerRequests(bus._redis), sites, hosts, "worker-0")
    running = asyncio.create_task(runner.run())
    yield
    await cancel_all([running])


async def settled(http: httpx.AsyncClient, reference: str) -> dict[str, Any]:
    """The version once it was examined."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found: dict[str, Any] = (await http.get(f"/v1/environments/{reference}")).json()
        if found["status"] != "validating":
            return found
        await asyncio.sleep(0.05)
    raise AssertionError("it was not examined")


# Registering


async def test_one_registered_with_half_a_character_hides_no_others(
    http: httpx.AsyncClient, registry: EnvironmentRegistry
) -> None:
    config = {"x": "\ud800"}
    source = {"type": "reference", "ref": REF, "config": config}
    one, _ = registry.add(Registration("old", 0, "", "2026-01-01T00:00:00.000Z", source, REF, config))
    finding: ExaminationFinding = {"id": "reset", "status": "fail", "message": "got \udfff", "data": None}
    registry.add_report(one, {"name": "old", "ok": False, "checks": [finding]})
    assert (await http.post("/v1/environments", json=SUMS)).status_code == 201
    listed = (await http.get("/v1/environments")).json()["data"]
    assert [(each["id"], each["source"].get("config"), each["failures"]) for each in listed] == [
        ("old@1", {"x": "?"}, ["got ?"]),
        ("sums@1", {}, []),
    ]


async def test_content_makes_a_version_and_the_same_content_no_other(http: httpx.AsyncClient):
    first = await http.post("/v1/environments", json=SUMS)
    again = await http.post("/v1/environments", json=SUMS)
    other = await http.post("/v1/environments", json={"name": "sums", "source": {**SUMS["source"], "config": {"x": 1}}})
    assert (first.status_code, again.status_code, other.status_code) == (201, 200, 201)
    assert first.json()["id"] == again.json()["id"] == "sums@1"
    assert other.json()["id"] == "sums@2"
    assert first.headers["location"] == "/v1/environments/sums@1"
    assert (await http.get("/v1/environments/sums")).json()["id"] == "sums@2"
    listed = (await http.get("/v1/environments?limit=1")).json()
    assert (listed["has_more"], listed["last_id"]) == (True, "sums@1")
    rest = (await http.get("/v1/environments", params={"after": "sums@1", "name": "sums"})).json()
    assert [one["id"] for one in rest["data"]] == ["sums@2"]


async def test_twenty_processes_that_register_at_once_make_one_version_each(store: Store, jobs_dir: Path):
    async with (
        application(store, jobs_dir=jobs_dir) as one,
        application(store, jobs_dir=jobs_dir) as two,
        http_to(one) as first,
        http_to(two) as second,
    ):
        answers = await asyncio.gather(
            *(http.post("/v1/environments", json=SUMS) for _ in range(10) for http in (first, second))
        )
        assert {answer.json()["id"] for answer in answers} == {"sums@1"}
        assert sum(answer.status_code == 201 for answer in answers) == 1


async def test_an_environment_has_a_tag_for_looking_again_and_for_removing(http: httpx.AsyncClient):
    await http.post("/v1/environments", json=SUMS)
    tag = (await http.get("/v1/environments/sums@1")).headers["etag"]
    assert (await http.get("/v1/environments/sums@1", headers={"If-None-Match": tag})).status_code == 304
    wrong = await http.delete("/v1/environments/sums@1", headers={"If-Match": '"other.0"'})
    assert (wrong.status_code, error_of(wrong)["code"]) == (412, "precondition_failed")
    assert (await http.delete("/v1/environments/sums@1", headers={"If-Match": tag})).status_code == 204


MCP = {"type": "mcp", "url": "http://127.0.0.1:9/mcp", "reward": "a:b", "tasks": []}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"name": "Sums", "source": SUMS["source"]}, "validation_failed"),
    ({"name": "../x", "source": SUMS["source"]}, "validation_failed"),
    ({"name": "x", "source": {"type": "git", "url": "https://x"}}, "validation_failed"),
    ({"name": "x", "source": {"type": "reference", "ref": "file.py:Class"}}, "validation_failed"),
    ({"name": "x", "source": {"type": "reference"}}, "missing_field"),
    ({"name": "x", "source": {"type": "openenv", "url": "ws://10.0.0.1/ws"}}, "address_refused"),
    ({"name": "x", "source": {"type": "openenv", "url": "wss://169.254.169.254/ws"}}, "address_refused"),
    ({"name": "x", "source": {"type": "gym", "id": "a", "config": {"id": "b"}}}, "validation_failed"),
    ({"name": "x", "source": MCP | {"config": {"command": ["sh"]}}}, "validation_failed"),
]


async def test_what_cannot_be_registered_is_refused_with_the_reason(http: httpx.AsyncClient):
    for body, code in REFUSED:
        answer = await http.post("/v1/environments", json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (422, code), body
    missing = await http.post("/v1/environments", json=REFUSED[4][0])
    assert error_of(missing)["param"] == "source.ref"
    assert (await http.get("/v1/environments")).json()["data"] == []


@pytest.mark.usefixtures("worker")
async def test_an_environment_is_examined_shown_and_tried_by_a_worker(http: httpx.AsyncClient):
    await http.post("/v1/environments", json=SUMS)
    assert (await settled(http, "sums@1"))["status"] == "ready"
    schema = (await http.get("/v1/environments/sums/schema")).json()["description"]
    assert schema["tools"][0]["function"]["name"] == "calculate"
    tasks = (await http.get("/v1/environments/sums/tasks?first=2&limit=3")).json()
    assert (len(tasks["tasks"]), tasks["total"]) == (3, schema["num_tasks"]["train"])
    expression = tasks["tasks"][0]["expression"]
    turns = [
        {"calls": [{"name": "calculate", "arguments": {"expression": expression}}]},
        {"text": str(eval(expression))},
    ]
    played = (await http.post("/v1/environments/sums/try", json={"task": 2, "turns": turns})).json()
    assert (played["reward"], played["stop_reason"]) == (1.0, "completed")
    assert [entry["from"] for entry in played["transcript"]][-3:] == ["policy", "environment", "policy"]
    wrong = (await http.post("/v1/environments/sums/try", json={"task": 2, "turns": [{"text": "no"}]})).json()
    assert wrong["reward"] == 0.0


@pytest.mark.usefixtures("worker")
async def test_an_unfit_environment_says_why_and_no_job_may_name_it(http: httpx.AsyncClient):
    body = {"name": "gone", "source": {"type": "reference", "ref": "environments.nowhere:Class"}}
    await http.post("/v1/environments", json=body)
    found = await settled(http, "gone")
    assert found["status"] == "invalid"
    assert "environments.nowhere" in found["failures"][0]
    answer = await http.post("/v1/jobs", json=SPEC | {"environments": [{"ref": "gone"}]})
    assert (answer.status_code, error_of(answer)["code"]) == (422, "environment_invalid")
    asked = await http.get("/v1/environments/gone/schema")
    assert (asked.status_code, error_of(asked)["code"]) == (422, "environment_invalid")


async def test_without_a_worker_the_answer_is_503_and_nothing_is_left(
    http: httpx.AsyncClient, bus: Bus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("services.state.process_requests.TAKEN_WITHIN_S", 0.1)
    await http.post("/v1/environments", json=SUMS)
    before = await bus._redis.xlen("gspo:{service}:errands")
    answer = await http.get("/v1/environments/sums/schema")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "no_worker")
    assert answer.headers["retry-after"] == "5"
    assert await bus._redis.xlen("gspo:{service}:errands") == before


# Jobs


async def test_a_job_is_pinned_to_a_version_which_then_cannot_be_removed(http: httpx.AsyncClient):
    await http.post("/v1/environments", json=SUMS)
    job = (await http.post("/v1/jobs", json=SPEC | {"environments": [{"ref": "sums"}]})).json()
    config = (await http.get(job["links"]["config"])).json()["config"]
    assert config["environments"][0]["ref"] == "sums@1"
    held = await http.delete("/v1/environments/sums@1")
    assert (held.status_code, error_of(held)["code"]) == (409, "environment_in_use")
    await http.post(job["links"]["cancel"])
    assert (await http.delete("/v1/environments/sums@1")).status_code == 204
    assert error_of(await http.get("/v1/environments/sums@1"))["code"] == "environment_not_found"
    assert (await http.post("/v1/environments", json=SUMS)).json()["id"] == "sums@2"
    gone = await http.post("/v1/jobs", json=SPEC | {"environments": [{"ref": "sums@1"}]})
    assert (gone.status_code, error_of(gone)["code"]) == (422, "environment_not_found")


async def test_a_submission_that_is_sent_again_is_the_same_job_whatever_became_of_its_environment(
    http: httpx.AsyncClient,
):
    await http.post("/v1/environments", json=SUMS)
    body, key = SPEC | {"environments": [{"ref": "sums"}]}, {"Idempotency-Key": "k"}
    facade = {"model": "m", "training_file": "env:sums"}
    routes = "/v1/jobs", "/v1/fine_tuning/jobs"
    job = (await http.post(routes[0], json=body, headers=key)).json()["id"]
    other = (await http.post(routes[1], json=facade)).json()["id"]

    async def repeated() -> list[str]:
        answers = [
            await http.post(routes[0], json=body, headers=key),
            await http.post(routes[1], json=facade, headers={"x-stainless-retry-count": "1"}),
        ]
        assert [answer.status_code for answer in answers] == [201, 200], [answer.text for answer in answers]
        return [answer.json()["id"] for answer in answers]

    await http.post("/v1/environments", json={"name": "sums", "source": {**SUMS["source"], "config": {"x": 1}}})
    assert await repeated() == [job, other]
    for one in (job, other):
        await http.post(f"/v1/jobs/{one}/cancel")
    for version in ("sums@1", "sums@2"):
        assert (await http.delete(f"/v1/environments/{version}")).status_code == 204
    assert await repeated() == [job, other]
    changed = await http.post(routes[0], json=body | {"steps": 3}, headers=key)
    assert (changed.status_code, error_of(changed)["code"]) == (409, "idempotency_conflict")
    fresh = await http.post(routes[0], json=body, headers={"Idempotency-Key": "another"})
    assert error_of(fresh)["code"] == "environment_not_found"


async def test_a_version_keeps_its_config(http: httpx.AsyncClient):
    await http.post("/v1/environments", json=SUMS)
    answer = await http.post("/v1/jobs", json=SPEC | {"environments": [{"ref": "sums@1", "config": {"url": "x"}}]})
    assert (answer.status_code, error_of(answer)["param"]) == (422, "environments[0].config")


# Uploads


async def post_file(http: httpx.AsyncClient, name: str, ref: str, content: bytes, kind: str) -> httpx.Response:
    params = {"name": name, "ref": ref}
    return await http.post("/v1/environments/uploads", params=params, content=content, headers={"Content-Type": kind})


def zipped(files: dict[str, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


@pytest.mark.usefixtures("worker")
async def test_an_uploaded_file_runs_in_hosts_and_is_never_imported_here(
    http: httpx.AsyncClient, registry: EnvironmentRegistry
):
    before = set(sys.modules)  # other tests load files of this name here
    answer = await post_file(http, "guess", "guess.py:Guess", GUESS.encode(), "text/x-python")
    assert answer.status_code == 201, answer.text
    assert (await settled(http, "guess"))["status"] == "ready"
    played = (await http.post("/v1/environments/guess@1/try", json={"task": 1})).json()
    (acted,) = [entry for entry in played["transcript"] if entry["from"] == "policy"]
    assert (played["reward"], acted["calls"][0]["arguments"]) == (1.0, {"value": 5})
    assert not [name for name in set(sys.modules) - before if "guess" in name]
    order = Sites(registry).placed(HostOrder("guess@1"))
    environment = await HostedEnvironment.open(order, boot=RunningHost.boot)
    await environment.close()
    with pytest.raises(InvalidEnvironment, match="run references only"):
        Sites(registry, elsewhere=True).placed(HostOrder("guess@1"))


# Twice forked, in a session of its own: as whatever wants to outlive its parents does it.
DAEMON = """
import os, time

def leave_a_daemon():
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            with open({pids!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)

leave_a_daemon()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("worker", [Tier.PROCESS], indirect=True)
async def test_a_daemon_of_an_uploaded_environment_ends_with_what_it_was_started_for(
    http: httpx.AsyncClient, tmp_path: Path
):
    pids = tmp_path / "pids"
    source = DAEMON.format(pids=str(pids)) + GUESS
    await post_file(http, "guess", "guess.py:Guess", source.encode(), "text/x-python")
    assert (await settled(http, "guess"))["status"] == "ready"
    examined = pids.read_text().split()
    assert (await http.post("/v1/environments/guess@1/try", json={"task": 1})).json()["reward"] == 1.0
    tried = pids.read_text().split()
    assert len(tried) > len(examined) > 0
    assert [pid for pid in tried if is_running(pid)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can be adopted on Linux only")
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("worker", [Tier.PROCESS], indirect=True)
async def test_a_daemon_ends_with_an_examination_that_is_ended(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(request_runner, "MAX_SECONDS", 3.0)
    pids = tmp_path / "pids"
    source = DAEMON.format(pids=str(pids)) + "time.sleep(600)\n" + GUESS
    await post_file(http, "guess", "guess.py:Guess", source.encode(), "text/x-python")
    found = await settled(http, "guess")
    assert "did not end within 3s" in str(found["failures"])
    assert [pid for pid in pids.read_text().split() if is_running(pid)] == []


@pytest.mark.usefixtures("worker")
async def test_a_package_finds_its_own_modules(http: httpx.AsyncClient):
    files = {
        "world/__init__.py": "",
        "world/numbers.py": "TASKS = [{'number': 3}, {'number': 5}]",
        "world/guess.py": "from world.numbers import TASKS\n"
        + GUESS.replace('[{"number": 3}, {"number": 5}]', "TASKS"),
    }
    package = zipped(files)
    answer = await post_file(http, "world", "world.guess:Guess", package, "application/zip")
    assert answer.status_code == 201, answer.text
    found = await settled(http, "world")
    assert found["status"] == "ready", found["failures"]
    again = await post_file(http, "world", "world.guess:Guess", package, "application/zip")
    assert (again.status_code, again.json()["id"]) == (200, "world@1")


async def test_uploads_are_off_unless_they_were_enabled(store: Store, jobs_dir: Path):
    async with application(store, jobs_dir=jobs_dir) as app, http_to(app) as http:
        answer = await post_file(http, "guess", "guess.py:Guess", GUESS.encode(), "text/x-python")
    assert (answer.status_code, error_of(answer)["code"]) == (403, "uploads_disabled")
    assert not (jobs_dir.parent / "environments").exists()


async def test_uploads_that_cannot_be_taken_leave_nothing_behind(
    http: httpx.AsyncClient, registry: EnvironmentRegistry
):
    for ref, content, kind, status, code in (
        ("guess.py:Guess", b"x", "text/html", 415, "unsupported_media_type"),
        ("guess.py:Guess", b"x" * (10 << 20) + b"x", "text/x-python", 413, "body_too_large"),
        ("a/guess.py:Guess", b"x", "text/x-python", 422, "validation_failed"),
        ("../guess.py:Guess", b"x", "text/x-python", 422, "validation_failed"),
        ("a/../../x.py:X", zipped({"a/b.py": "x"}), "application/zip", 422, "validation_failed"),
        ("a/../a/b.py:X", zipped({"a/b.py": "x"}), "application/zip", 422, "validation_failed"),
        ("guess.py:Guess", b"no archive", "application/zip", 422, "archive_refused"),
        ("other.py:Guess", zipped({"guess.py": "x"}), "application/zip", 422, "validation_failed"),
    ):
        answer = await post_file(http, "guess", ref, content, kind)
        assert (answer.status_code, error_of(answer)["code"]) == (status, code), (ref, kind)
    assert registry.all() == []
    assert [path for path in registry._directory.path.rglob("*") if path.name != UPLOADS] == []


async def test_an_upload_under_a_name_of_somebody_else_leaves_nothing_behind(
    store: Store, jobs_dir: Path, registry: EnvironmentRegistry, tmp_path: Path
):
    ring = KeyRing(KeysDir(tmp_path / "keys"))
    mine, other = (ring.issue(name, ["env:upload"])[1] for name in ("alice", "bob"))
    async with application(store, jobs_dir=jobs_dir, ring=ring, may_upload=True) as app:
        async with http_to(app, key=mine) as http:
            assert (await post_file(http, "guess", "g.py:G", b"class G: ...", "text/x-python")).status_code == 201
        async with http_to(app, key=other) as http:
            answer = await post_file(http, "guess", "h.py:H", b"class H: ...", "text/x-python")
    assert (answer.status_code, error_of(answer)["code"]) == (409, "name_taken")
    assert len(list((registry._directory.path / UPLOADS).iterdir())) == 1


# Others


async def test_what_belongs_to_others_is_not_there(store: Store, jobs_dir: Path, tmp_path: Path):
    ring = KeyRing(KeysDir(tmp_path / "keys"))
    scopes = ("jobs:read", "jobs:write", "envs:write")
    alice, bob = (ring.issue(name, scopes)[1] for name in ("alice", "bob"))
    async with application(store, jobs_dir=jobs_dir, keys=["admin"], ring=ring) as app:
        async with http_to(app, key=alice) as http:
            await http.post("/v1/environments", json=SUMS)
        async with http_to(app, key=bob) as http:
            assert (await http.get("/v1/environments/sums")).status_code == 404
            assert (await http.delete("/v1/environments/sums@1")).status_code == 404
            assert (await http.get("/v1/environments")).json()["data"] == []
            assert error_of(await http.post("/v1/environments", json=SUMS))["code"] == "name_taken"
            job = await http.post("/v1/jobs", json=SPEC | {"environments": [{"ref": "sums@1"}]})
            assert error_of(job)["code"] == "environment_not_found"
            assert error_of(await post_file(http, "x", "x.py:X", b"x", "text/x-python"))["code"] == "scope_required"
        for admin, name in (("admin", "shared"), (ring.issue("carol", ["admin"])[1], "shared-as-well")):
            async with http_to(app, key=admin) as http:
                await http.post("/v1/environments", json=SUMS | {"name": name})
            async with http_to(app, key=bob) as http:
                assert (await http.get(f"/v1/environments/{name}")).status_code == 200
                assert (await http.delete(f"/v1/environments/{name}@1")).status_code == 404


# Processes


def test_the_client_registers_uploads_and_tries_with_a_worker_in_a_process_of_its_own(
    redis_server: RedisServer, store: Store, tmp_path: Path
):
    settings = {"GSPO_DATA_DIR": str(tmp_path), "GSPO_ENV_UPLOADS": "true", "GSPO_API_KEYS": "k"}
    own = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
    with ApiProcess(redis_server.url, **settings) as api, Client(api.url, "k") as client:
        worker = Child(
            ["-m", "services.rollout"],
            env=own | {"GSPO_REDIS_URL": redis_server.url, "GSPO_DATA_DIR": str(tmp_path)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
        try:
            assert client.register_environment("sums", SUMS["source"])["id"] == "sums@1"
            uploaded = client.upload_environment("guess", "guess.py:Guess", GUESS.encode(), kind="text/x-python")
            assert uploaded["id"] == "guess@1"
            assert client.validate_environment("sums")["ok"]
            assert client.try_environment("guess", task=1)["reward"] == 1.0
            assert client.try_environment("guess", [{"text": "no"}])["reward"] == 0.0
            assert client.environment_tasks("guess", 1) == [{"number": 5}]
            assert client.environment_schema("guess@1")["tools"][0]["function"]["name"] == "guess"
            assert [one["id"] for one in client.environments()] == ["guess@1", "sums@1"]
            assert client.environment("sums")["status"] == "ready"
            client.remove_environment("sums@1")
            client.remove_environment("sums@1")
            assert [one["id"] for one in client.environments(name="sums")] == []
            with pytest.raises(ApiError, match="environment_not_found"):
                client.environment("sums")
            (name,) = [one["id"] for one in client.workers() if one["role"] == "rollout"]
            assert client.drain_worker(name) == client.drain_worker(name)
            assert worker.wait(HANG_S) == 0
            with pytest.raises(ApiError, match="worker_not_found"):
                client.drain_worker("nobody")
        finally:
            worker.kill()
            worker.wait()
        assert not [line for line in api.log() if "request failed" in line]
