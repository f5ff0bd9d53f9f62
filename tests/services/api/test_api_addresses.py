"""URLs that a job itself names, in the config of a class: judged when it is submitted, and again when it connects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gspo_core.env import EnvironmentFailed
from gspo_core.outbound import parse_networks
from gspo_core.types import Split
from services.files.data_dir import EnvironmentsDir
from services.files.environments.named_urls import MAX_HOSTS, AddressNamed, ResolverShare, check_urls, urls_in
from services.files.environments.registry import EnvironmentRegistry
from services.hosts.server import HostOrder, RunningHost
from services.hosts.session import HostedEnvironment
from services.hosts.sites import Sites
from services.state.store import Store
from tests.services.api.api_kit import SPEC, application, error_of, http_to

OPENENV, OWN = "environments.adapters.openenv:OpenEnv", "environments.calculator:Calculator"
REFUSED = (
    "ws://127.0.0.1:8000/ws",
    "https://127.1/",
    "HTTP://0x7f000001/",
    "  https://169.254.169.254/latest",
    "http://10.0.0.1",
    "https://[::1]/",
    "https://[::ffff:169.254.169.254]/",
    "https://[64:ff9b::7f00:1]/",
    "wss://user:secret@8.8.8.8/",
    "https://8.8.8.8:6379/",
    "http://8.8.8.8/",
    "https:///nowhere",
    "https:169.254.169.254",
)
PROBE = '''
import socket

class Probe:
    """Connects to where it is told."""
    tasks = [{"number": 1}]

    def __init__(self, url: str) -> None:
        self.port = int(url.rsplit(":", 1)[1])

    def reset(self, number: int) -> str:
        socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        return "connected"

    def get_reward(self) -> float:
        return 0.0
'''


@pytest.fixture
async def http(store: Store, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    networks = parse_networks(["192.168.7.0/24"])
    async with application(store, jobs_dir=tmp_path / "jobs", networks=networks) as app, http_to(app) as http:
        yield http


def spec(config: dict[str, Any], ref: str = OWN) -> dict[str, Any]:
    return SPEC | {"environments": [{"ref": OWN}, {"ref": ref, "config": config}]}


@pytest.mark.parametrize("url", REFUSED)
async def test_a_job_whose_config_leads_inside_is_refused(http: httpx.AsyncClient, url: str):
    for body, where in (
        (spec({"url": url}, OPENENV), "url"),
        (spec({"servers": [{"at": "x"}, {"at": url}]}), "servers[1].at"),
    ):
        for path in ("/v1/jobs", "/v1/jobs?dry_run=true"):
            answer = await http.post(path, json=body)
            assert (answer.status_code, error_of(answer)["code"]) == (422, "address_refused"), body
            assert error_of(answer)["param"] == f"environments[1].config.{where}"
            assert "GSPO_OUTBOUND_NETWORKS" in error_of(answer)["message"]
    facade = {"model": "m", "training_file": f"env:{OWN}", "environments": spec({"url": url})["environments"]}
    assert error_of(await http.post("/v1/fine_tuning/jobs", json=facade))["code"] == "address_refused"
    registered = {"name": "x", "source": {"type": "reference", "ref": OWN, "config": {"deep": [url]}}}
    answer = await http.post("/v1/environments", json=registered)
    assert (error_of(answer)["code"], error_of(answer)["param"]) == ("address_refused", "source.config.deep[0]")
    assert (await http.get("/v1/jobs")).json()["data"] == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://169.254.169.254", "http://8.8.8.8/v1"])
async def test_a_judge_that_leads_inside_is_refused(http: httpx.AsyncClient, url: str):
    judge = {"url": url, "model": "m", "prompt": "{{answer}}"}
    body = SPEC | {"environments": [{"ref": "agent.py:run", "agent": {"judge": judge}}]}
    for path in ("/v1/jobs", "/v1/jobs?dry_run=true"):
        answer = await http.post(path, json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (422, "address_refused")
        assert error_of(answer)["param"] == "environments[0].agent.judge.url"


async def test_a_plan_says_what_nobody_has_asked_a_judge(http: httpx.AsyncClient):
    judge = {"url": "https://8.8.8.8/v1", "model": "m", "prompt": "{{task.name}} {{answer}}", "key": "mine"}
    body = SPEC | {"environments": [{"ref": "agent.py:run", "agent": {"judge": judge}}]}
    plan = (await http.post("/v1/jobs?dry_run=true", json=body)).json()
    (said,) = [one for one in plan["unchecked"] if one.startswith("environments[0].agent.judge: ")]
    for words in ("m answers at https://8.8.8.8/v1", "key mine", "GSPO_JUDGE_KEYS", "fields of its prompt"):
        assert words in said


async def test_public_addresses_networks_of_the_operator_and_mere_words_are_taken(http: httpx.AsyncClient):
    for text in ("https://8.8.8.8/mcp", "ws://192.168.7.9:1234/ws", "http is a word", "https://10.0.0.1 is inside"):
        answer = await http.post("/v1/jobs", json=spec({"text": text}))
        assert answer.status_code == 201, answer.text


def test_a_host_is_judged_once_and_not_more_than_some():
    same = {"tasks": [{"page": f"https://8.8.8.8/{number}"} for number in range(10_000)]}
    check_urls(same, ())
    with pytest.raises(AddressNamed, match="different hosts"):
        check_urls([f"https://8.8.{number}.8/" for number in range(MAX_HOSTS + 1)], ())
    assert list(urls_in({"a": 1, "b": None, "c": ["ws://x"]})) == [("config.c[0]", "ws://x")]


def test_a_slow_resolver_is_not_asked_for_long(monkeypatch: pytest.MonkeyPatch):
    now, asked = [0.0], list[str]()

    def slow(url: str, networks: object) -> None:
        asked.append(url)
        now[0] += 10.0

    monkeypatch.setattr("services.files.environments.named_urls.check_url", slow)
    share = ResolverShare(lambda: now[0])
    for number in range(2):  # each environment of a job
        check_urls({"url": f"https://a{number}.example"}, (), share)
    with pytest.raises(AddressNamed, match="too long"):
        check_urls({"url": "https://one.example"}, (), share)
    assert len(asked) == 2


async def test_the_host_of_a_class_with_a_url_connects_to_nothing_else(tmp_path: Path):
    """What a resolver says later is judged later: the listener counts what arrives."""
    (tmp_path / "probe.py").write_text(PROBE)
    arrived: list[None] = []
    server = await asyncio.start_server(lambda reader, writer: arrived.append(writer.close()), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def play(networks: tuple[str, ...]) -> None:
        order = HostOrder(f"{tmp_path}/probe.py:Probe", {"url": f"https://public.example:{port}"})
        placed = Sites(EnvironmentRegistry(EnvironmentsDir(tmp_path / "environments")), networks).placed(order)
        environment = await HostedEnvironment.open(placed, boot=RunningHost.boot)
        session = environment.session(episode_id="job/0/0")
        try:
            await session.start(await environment.task(Split.TRAIN, 0), seed=0)
        finally:
            await session.close()
            await environment.close()

    async with server:
        with pytest.raises(EnvironmentFailed):
            await play(())
        assert arrived == []
        await play(("127.0.0.0/8",))
        assert len(arrived) == 1
