"""Agents in the registry: programs and services registered with their tasks, examined, listed, and named by jobs."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.cli import main
from gspo_core.env import InvalidEnvironment, Llm
from gspo_core.outbound import parse_networks
from gspo_core.types import Split
from services.files.data_dir import EnvironmentsDir
from services.files.environments.registry import EnvironmentRegistry
from services.files.job_dir import JobsDir
from services.hosts.local import LocalHosts
from services.hosts.server import HostOrder, RunningHost
from services.hosts.session import HostedAgentSession, HostedEnvironment
from services.hosts.sites import Sites
from services.hosts.venv import Interpreters
from services.process.cancelling import cancel_all
from services.rollout.request_runner import RequestRunner
from services.state.process_requests import WorkerRequests
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.repo.pages import block
from tests.services.api.api_kit import SPEC, ApiProcess, application, error_of, http_to
from tests.services.api.test_api_environments import settled

LOOPBACK = parse_networks(["127.0.0.0/8"])
TASKS = """
class Shop:
    tasks = [{"number": 1}, {"number": 2}]
    eval_tasks = [{"number": 3}]

def judged(task, folder):
    return 1.0 if (folder / "said").read_text() == str(task["number"]) else 0.0
"""
PROGRAM = """
import json, os, pathlib
task = json.loads(os.environ["GSPO_TASK"])
pathlib.Path(os.environ["TMPDIR"], "said").write_text(str(task["number"]))
assert pathlib.Path("tasks.py").exists()
"""
COMMAND = {"command": [sys.executable, "agent.py"], "reward": "tasks.py:judged"}
SERVICE = {"url": "http://127.0.0.1:9/play"}


def package() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("tasks.py", TASKS)
        archive.writestr("agent.py", PROGRAM)
    return data.getvalue()


PACKAGE = package()


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def registry(jobs_dir: Path) -> EnvironmentRegistry:
    return EnvironmentRegistry(EnvironmentsDir(jobs_dir.parent / "environments"))


@pytest.fixture
async def http(store: Store, jobs_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(store, jobs_dir=jobs_dir, networks=LOOPBACK, may_upload=True) as app, http_to(app) as http:
        http.timeout = httpx.Timeout(120)
        yield http


@pytest.fixture
async def worker(bus: Bus, registry: EnvironmentRegistry, tmp_path: Path) -> AsyncIterator[None]:
    sites = Sites(registry, ("127.0.0.0/8",))
    runner = RequestRunner(WorkerRequests(bus._redis), sites, LocalHosts(Interpreters(tmp_path / "venvs")), "worker-0")
    running = asyncio.create_task(runner.run())
    yield
    await cancel_all([running])


async def upload(http: httpx.AsyncClient, agent: dict[str, Any], name: str = "shop") -> httpx.Response:
    params = {"name": name, "ref": "tasks.py:Shop", "agent": json.dumps(agent)}
    headers = {"Content-Type": "application/zip"}
    return await http.post("/v1/environments/uploads", params=params, content=PACKAGE, headers=headers)


async def register(http: httpx.AsyncClient, agent: dict[str, Any] | None, name: str = "served") -> httpx.Response:
    source = {"type": "reference", "ref": "examples.agent.questions:Questions"}
    return await http.post("/v1/environments", json={"name": name, "source": source, "agent": agent})


def job(ref: str, **entry: Any) -> dict[str, Any]:
    return SPEC | {"environments": [{"ref": ref, **entry}]}


@pytest.mark.usefixtures("worker")
async def test_a_program_is_registered_with_its_tasks_and_examined(http: httpx.AsyncClient) -> None:
    answer = await upload(http, COMMAND)
    assert answer.status_code == 201, answer.text
    assert (answer.json()["id"], answer.json()["agent"]) == ("shop@1", COMMAND)
    assert (await settled(http, "shop"))["status"] == "ready"
    report = (await http.post("/v1/environments/shop/validate")).json()
    found = {check["id"]: (check["status"], check["message"]) for check in report["checks"]}
    assert found["start"][0] == "pass"
    assert found["tasks"] == ("pass", "2 to train, 1 held out")
    assert found["reward"][0] == "pass"
    tasks = (await http.get("/v1/environments/shop/tasks")).json()
    assert tasks["total"] == 2
    tried = await http.post("/v1/environments/shop/try", json={"turns": [{"text": "x"}]})
    assert (tried.status_code, error_of(tried)["code"]) == (422, "environment_invalid")
    assert "an agent plays it" in error_of(tried)["message"]
    assert (await upload(http, COMMAND)).status_code == 200
    assert (await upload(http, COMMAND | {"command": ["nobody-has-this"]})).json()["id"] == "shop@2"
    unfit = await settled(http, "shop@2")
    assert unfit["status"] == "invalid"
    assert "no program nobody-has-this" in unfit["failures"][0]


@pytest.mark.parametrize("reward", ["../judge.py:judged", "a/../../judge.py:judged"])
async def test_what_judges_an_upload_lies_in_it(
    http: httpx.AsyncClient, registry: EnvironmentRegistry, reward: str
) -> None:
    refused = await upload(http, COMMAND | {"reward": reward})
    assert (refused.status_code, error_of(refused)["param"]) == (422, "agent")
    assert "the reward points outside of the upload" in error_of(refused)["message"]
    assert (await upload(http, COMMAND)).status_code == 201
    with pytest.raises(InvalidEnvironment, match=r"judge\.py lies outside of the upload"):
        Sites(registry).placed(HostOrder("shop@1", agent={"reward": reward}))


async def test_a_link_leads_nothing_out_of_an_upload(
    http: httpx.AsyncClient, registry: EnvironmentRegistry, tmp_path: Path
) -> None:
    assert (await upload(http, COMMAND)).status_code == 201
    digest = registry.get("shop@1").upload
    assert digest is not None
    (registry.upload_dir(digest) / "out").symlink_to(tmp_path)
    with pytest.raises(InvalidEnvironment, match=r"out/judge\.py lies outside of the upload"):
        Sites(registry).placed(HostOrder("shop@1", agent={"reward": "out/judge.py:judged"}))
    placed = Sites(registry).placed(HostOrder("shop@1", agent={"reward": "tasks.py:judged"}))
    assert placed.agent == {"reward": f"{registry.upload_dir(digest)}/tasks.py:judged"}


@pytest.mark.usefixtures("worker")
async def test_a_service_is_registered_and_not_called_when_it_is_examined(http: httpx.AsyncClient) -> None:
    assert (await register(http, SERVICE)).json()["agent"] == SERVICE
    assert (await settled(http, "served"))["status"] == "ready"
    listed = (await http.get("/v1/environments")).json()["data"]
    assert [(one["id"], one["agent"]) for one in listed] == [("served@1", SERVICE)]


async def test_addresses_and_ways_to_start_it_are_judged(http: httpx.AsyncClient) -> None:
    judge = {"url": "https://169.254.169.254/v1", "model": "m", "prompt": "{{answer}}"}
    for agent, status, code in (
        ({"url": "http://10.0.0.1/play"}, 422, "address_refused"),
        ({"judge": judge}, 422, "address_refused"),
        ({"url": "https://8.8.8.8/", "pull": True}, 422, "validation_failed"),
    ):
        for answer in (await register(http, agent), await upload(http, agent)):
            assert answer.status_code == status, answer.text
            assert error_of(answer)["code"] in (code, "validation_failed")
    assert (await http.get("/v1/environments")).json()["data"] == []


async def test_a_job_names_a_registered_agent_and_says_no_more_of_it(http: httpx.AsyncClient) -> None:
    await upload(http, COMMAND)
    for entry in ({}, {"agent": {}}):
        stored = await http.post("/v1/jobs", json=job("shop", **entry))
        assert stored.status_code == 201, stored.text
        spec = (await http.get(f"/v1/jobs/{stored.json()['id']}/config")).json()["config"]
        (named,) = spec["environments"]
        assert (named["ref"], named["agent"]["command"]) == ("shop@1", COMMAND["command"])
    late = await http.post("/v1/jobs", json=job("shop", agent={}) | {"rewards": {"deadline_s": 60}})
    assert late.status_code == 201, late.text
    other = await http.post("/v1/jobs", json=job("shop", agent=SERVICE))
    assert (other.status_code, error_of(other)["param"]) == (422, "environments[0].agent")
    assert "has its own agent" in error_of(other)["message"]
    mixed = SPEC | {"environments": [{"ref": "environments.calculator:Calculator"}, {"ref": "shop"}]}
    refused = await http.post("/v1/jobs", json=mixed)
    assert (refused.status_code, error_of(refused)["code"]) == (422, "validation_failed")
    assert "wholly of agents or wholly of environments" in error_of(refused)["message"]


async def test_a_job_of_a_registered_agent_is_forked_and_submitted_again(store: Store, jobs_dir: Path) -> None:
    kept = Store(store._functions.redis, jobs_dir=JobsDir(jobs_dir))
    async with application(kept, jobs_dir=jobs_dir, networks=LOOPBACK) as app, http_to(app) as http:
        await register(http, SERVICE)
        parent = (await http.post("/v1/jobs", json=job("served"))).json()["id"]
        config = (await http.get(f"/v1/jobs/{parent}/config")).json()["config"]
        again = await http.post("/v1/jobs", json=config)
        assert again.status_code == 201, again.text
        plan = await http.post(f"/v1/jobs/{parent}/fork?dry_run=true", json={"step": 0})
        fork = await http.post(f"/v1/jobs/{parent}/fork", json={"step": 0})
        assert (plan.status_code, fork.status_code) == (200, 201), fork.text
        for made in (again, fork):
            theirs = (await http.get(f"/v1/jobs/{made.json()['id']}/config")).json()["config"]
            assert theirs["environments"] == config["environments"]


async def test_a_dry_fork_is_refused_as_the_fork_is(http: httpx.AsyncClient) -> None:
    await register(http, SERVICE)
    parent = (await http.post("/v1/jobs", json=job("served"))).json()["id"]
    await http.post(f"/v1/jobs/{parent}/cancel")
    assert (await http.delete("/v1/environments/served@1")).status_code == 204
    refused = [await http.post(f"/v1/jobs/{parent}/fork{query}", json={"step": 0}) for query in ("", "?dry_run=true")]
    for answer in refused:
        assert (answer.status_code, error_of(answer)["code"]) == (422, "environment_not_found")


@pytest.mark.parametrize("ref", ["served", "served@1"])
async def test_a_submission_that_is_sent_again_is_the_same_job(http: httpx.AsyncClient, ref: str) -> None:
    await register(http, SERVICE)
    headers = {"Idempotency-Key": "a"}
    first = await http.post("/v1/jobs", json=job(ref), headers=headers)
    await register(http, {"url": "http://127.0.0.1:10/play"})
    again = await http.post("/v1/jobs", json=job(ref, agent={}), headers={"Idempotency-Key": "b"})
    same = await http.post("/v1/jobs", json=job(ref), headers=headers)
    assert (first.status_code, same.json()["id"]) == (201, first.json()["id"])
    assert again.json()["id"] != first.json()["id"]


async def test_an_agent_that_is_not_registered_is_said_by_the_job(http: httpx.AsyncClient) -> None:
    await register(http, None)
    stored = await http.post("/v1/jobs", json=job("served", agent=SERVICE))
    spec = (await http.get(f"/v1/jobs/{stored.json()['id']}/config")).json()["config"]
    assert spec["environments"][0]["agent"]["url"] == SERVICE["url"]


async def test_a_registered_program_runs_beside_its_files(
    http: httpx.AsyncClient, registry: EnvironmentRegistry, tmp_path: Path
) -> None:
    await upload(http, COMMAND)
    placed = Sites(registry).placed(HostOrder("shop@1", agent=COMMAND))
    environment = await HostedEnvironment.open(placed, boot=RunningHost.boot)
    try:
        session = environment.session()
        assert isinstance(session, HostedAgentSession)
        await session.admit()
        session.offer(Llm("http://127.0.0.1:9/v1", "key", episode="e"))
        await session.start(await environment.task(Split.TRAIN, 1), seed=0)
        await session.ended()
        assert (await session.score())[0] == 1.0
        await session.close()
    finally:
        await environment.close()


async def test_what_has_no_agent_is_written_as_before(http: httpx.AsyncClient, registry: EnvironmentRegistry) -> None:
    """So that releases before go on reading it."""
    await register(http, None, "old")
    await register(http, SERVICE, "new")
    old, new = (json.loads(EnvironmentsDir(registry.path).record(name, 1).read_bytes()) for name in ("old", "new"))
    assert ("schema" in old, "agent" in old) == (False, False)
    assert (new["schema"], new["agent"]) == (2, SERVICE)
    assert [one.agent for one in registry.all()] == [SERVICE, None]


def test_the_command_of_the_page_registers_a_folder(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "tasks.py").write_text(TASKS)
    (folder / "agent.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(block("docs/agents.md", "gspo env add shop").text)
    assert program == "gspo"
    with ApiProcess(redis_server.url, GSPO_ENV_UPLOADS="true", GSPO_DATA_DIR=str(tmp_path / "data")) as api:
        assert main([*words, "--url", api.url]) == 0
        assert main(["env", "show", "shop", "--url", api.url]) == 0
    assert 'played by an agent: {"command": ["python", "agent.py"]}' in capsys.readouterr().out
