"""Agents in processes of their own: what they are told, who is blamed for their end, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import EnvironmentFailed, InvalidEnvironment, Llm, Timeouts
from gspo_core.types import Split
from services.files.environments.registry import EnvironmentRegistry
from services.hosts import wire
from services.hosts.process import HostProcess, HostReply
from services.hosts.server import HostOrder, RunningHost
from services.hosts.session import HostedAgentSession, HostedEnvironment, SessionLost
from services.hosts.sites import Sites
from tests.apparatus.processes import is_running
from tests.core.agent_kit import serving
from tests.services.hosts.test_host import gone
from tests.services.hosts.test_host_service import Service, service
from tests.services.rollout.rollout_kit import until

__all__ = ["service"]

LLM = Llm("http://127.0.0.1:1/v1", "ep_secret", episode="job-1/0/0/0", reward_key="rw_secret")
SHORT = Timeouts(reset_timeout_s=2.0, score_timeout_s=2.0, close_timeout_s=0.3)

AGENTS = """
import asyncio, ctypes, os, signal, subprocess, sys, threading, time

tasks = [{"told": "one", "count": 3}]

def mark(task, text):
    with open(task["mark"] + ".new", "w") as file:
        file.write(text)
    os.replace(task["mark"] + ".new", task["mark"])

async def run(task, llm, *, ctx):
    ctx.metric("count", task["count"])
    secrets = [name for name in os.environ if name.startswith("GSPO_")]
    return {"told": float(llm.api_key == "ep_secret" and not secrets), "count": task["count"]}

BEGUN = []

async def crashes(task, llm):
    BEGUN.append(task)
    while len(BEGUN) < task.get("together", 1):
        await asyncio.sleep(0.01)
    ctypes.string_at(0)

async def hangs(task, llm):
    child = subprocess.Popen(["sleep", "1000"])
    mark(task, f"{os.getpid()} {child.pid}")
    threading.Event().wait()

class Program:
    tasks = [{}]

    def __init__(self, mark=""):
        self.tasks = [{"mark": mark}]

class Searched:
    tasks = [{}]

    def get_reward(self, task, result):
        return {word: 1.0 for word in result.split()}

class Judged:
    tasks = [{"word": "four"}]

    def get_reward(self, task, result):
        return {"length": len(task["word"]), "said": result["said"]}
"""

HANGING = """
import json, os, subprocess, time
child = subprocess.Popen(["sleep", "1000"])
with open(json.loads(os.environ["GSPO_TASK"])["mark"], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(1000)
"""

SEARCHING = """
import os, re
parent = os.getppid()
found = set()
with open(f"/proc/{parent}/maps") as maps, open(f"/proc/{parent}/mem", "rb", 0) as memory:
    for start, end, rights in re.findall(r"(?m)^(\\w+)-(\\w+) (\\S+)", maps.read()):
        if rights.startswith("rw"):
            try:
                memory.seek(int(start, 16))
                found.update(re.findall(rb"(ep|rw)_secret", memory.read(int(end, 16) - int(start, 16))))
            except OSError:
                pass
print("looked", *sorted(kind.decode() for kind in found))
"""

Open = Callable[..., Awaitable[HostedEnvironment]]


@pytest.fixture
def agents(tmp_path: Path) -> str:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    return str(path)


@pytest.fixture
async def host(agents: str) -> AsyncIterator[Open]:
    opened: list[HostedEnvironment] = []

    async def start(
        name: str, agent: dict[str, Any] | None = None, hosting: dict[str, int] | None = None, **config: Any
    ) -> HostedEnvironment:
        order = HostOrder(f"{agents}:{name}", config, hosting or {}, agent=agent or {}, hang_grace_s=1.0)
        opened.append(await HostedEnvironment.open(order))
        return opened[-1]

    yield start
    for environment in opened:
        await environment.close()
        await gone(environment.pool.server_pid)


async def begun(environment: HostedEnvironment, index: int = 0, *, watched: bool = False) -> HostedAgentSession:
    session = environment.session(limits=SHORT, episode_id="job-1/0/0")
    assert isinstance(session, HostedAgentSession)
    if watched:
        session.watch()
    session.offer(LLM)
    await session.start(await environment.task(Split.TRAIN, index), seed=0)
    return session


async def pids_in(mark: Path) -> list[int]:
    await until(lambda: bool(_words(mark)))
    return [int(word) for word in _words(mark)]


def _words(mark: Path) -> list[str]:
    return mark.read_text().split() if mark.exists() else []


async def test_a_function_runs_there_and_gives_its_reward_and_its_numbers(host: Open) -> None:
    environment = await host("run")
    assert [environment.num_tasks(split) for split in Split] == [1, 0]
    session = await begun(environment)
    await session.ended()
    session.keep_evidence(1000)
    assert await session.score() == (4.0, {"told": 1.0, "count": 3.0})
    assert session.evidence.value("task") == {"told": "one", "count": 3}
    assert session.evidence.value("result") == {"told": 1.0, "count": 3}
    assert dict(session.metrics) == {"count": 3.0}
    await session.close()
    assert session.close_failure is None


@pytest.mark.parametrize(
    ("agent", "is_replayable", "num_sessions"),
    [
        ({}, False, 1),
        ({}, True, 16),
        ({"command": ["x"]}, True, 1),
        ({"url": "http://127.0.0.1/"}, False, 64),
        ({"pull": True}, False, 256),
    ],
)
async def test_they_share_a_process_where_that_is_harmless(
    agents: str, host: Open, agent: dict[str, Any], is_replayable: bool, num_sessions: int
) -> None:
    with open(agents, "a") as file:  # noqa: ASYNC230 - a short one
        file.write(f"replayable = Program.replayable = {is_replayable}\n")
    environment = await host("Program" if agent else "run", agent)
    assert environment.pool.description.sessions_per_process == num_sessions


@pytest.mark.parametrize("name", ["Judged", "run"])
async def test_the_task_is_handed_out_to_an_agent_that_fetches_it(host: Open, name: str) -> None:
    environment = await host(name, {"pull": True})
    session = await begun(environment)
    assert json.loads(await session.handed_out()) == (
        {"word": "four"} if name == "Judged" else {"told": "one", "count": 3}
    )
    with pytest.raises(EnvironmentFailed, match="no reward" if name == "run" else "NoneType"):
        await session.score()
    await session.close()


async def test_a_task_that_is_no_json_is_handed_out_to_nobody(agents: str, host: Open) -> None:
    with open(agents, "a") as file:  # noqa: ASYNC230 - a short one
        file.write("tasks = [{'when': {1, 2}}]\n")
    session = await begun(await host("run", {"pull": True}))
    with pytest.raises(EnvironmentFailed, match="which is no JSON"):
        await session.handed_out()
    await session.close()


async def test_of_agents_in_one_process_none_is_blamed_when_it_crashes(agents: str, host: Open) -> None:
    with open(agents, "a") as file:  # noqa: ASYNC230 - a short one
        file.write("replayable = True\n")
    tasks = [{"together": 2}, {"together": 1}]
    environment = await host("crashes", hosting={"max_processes": 1}, tasks=tasks)
    first, second = await begun(environment), await begun(environment)
    lost = await asyncio.gather(first.ended(), second.ended(), return_exceptions=True)
    assert [type(error) for error in lost] == [SessionLost, SessionLost]
    assert all(isinstance(error, SessionLost) and error.is_suspect for error in lost)
    again = await begun(environment, index=1, watched=True)
    with pytest.raises(EnvironmentFailed, match="its process crashed") as failed:
        await again.ended()
    assert not isinstance(failed.value, SessionLost)
    for session in (first, second, again):
        await session.close()


async def test_an_agent_that_crashes_its_process_has_failed(host: Open) -> None:
    session = await begun(await host("crashes"))
    with pytest.raises(EnvironmentFailed, match="its process crashed") as failed:
        await session.ended()
    assert failed.value.phase == "agent"
    assert not isinstance(failed.value, SessionLost)
    await session.close()


async def test_an_agent_that_was_killed_from_outside_is_lost_and_nobody_is_charged(host: Open, tmp_path: Path) -> None:
    environment = await host("hangs", tasks=[{"mark": str(tmp_path / "mark")}])
    session = await begun(environment)
    waiting = asyncio.create_task(session.ended())
    pid, child = await pids_in(tmp_path / "mark")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SessionLost, match="was killed from outside"):
        await waiting
    with pytest.raises(SessionLost, match="is gone"):
        await session.score()
    await session.close()
    await gone(pid, child)


async def test_an_agent_that_does_not_stop_is_ended_with_all_that_it_started(host: Open, tmp_path: Path) -> None:
    environment = await host("hangs", tasks=[{"mark": str(tmp_path / "mark")}])
    session = await begun(environment)
    pids = await pids_in(tmp_path / "mark")
    assert all(is_running(pid) for pid in pids)
    await session.close()
    assert session.close_failure == "the agent did not stop within 0.3s"
    await gone(*pids)


async def test_a_program_is_ended_with_all_that_it_started(host: Open, tmp_path: Path) -> None:
    agent = {"command": [sys.executable, "-c", HANGING]}
    session = await begun(await host("Program", agent, mark=str(tmp_path / "mark")))
    pids = await pids_in(tmp_path / "mark")
    await session.close()
    await gone(*pids)


@pytest.mark.parametrize(
    ("agent", "is_told"),
    [
        ({}, True),
        ({"url": "http://127.0.0.1:1/"}, True),
        ({"pull": True}, True),
        ({"command": ["x"]}, False),
        ({"command": ["x"], "acp": {}}, False),
    ],
)
async def test_the_key_that_pays_is_not_sent_where_a_program_is_started(
    host: Open, monkeypatch: pytest.MonkeyPatch, agent: dict[str, Any], is_told: bool
) -> None:
    sent: list[wire.Arguments] = []

    async def call(
        process: HostProcess, session: int, operation: str, budget_s: float, arguments: wire.Arguments
    ) -> HostReply:
        sent.append(arguments)
        return await real(process, session, operation, budget_s, arguments)

    real = HostProcess.call
    monkeypatch.setattr(HostProcess, "call", call)
    session = await begun(await host("Program" if agent else "run", agent))
    assert sent[0]["llm"]["api_key"] == "ep_secret"
    assert ("rw_secret" in str(sent)) is is_told
    await session.close()


async def test_a_program_finds_no_key_that_pays_in_the_memory_of_what_started_it(host: Open, tmp_path: Path) -> None:
    (tmp_path / "searching.py").write_text(SEARCHING)
    session = await begun(await host("Searched", {"command": [sys.executable, "searching.py"]}))
    await session.ended()
    _, found = await session.score()
    assert "looked" in found
    assert "rw" not in found
    await session.close()


async def test_a_service_is_judged_by_the_class_that_has_its_tasks(host: Open) -> None:
    with serving((200, b'{"said": 2}')) as remote:
        session = await begun(await host("Judged", {"url": remote.url}))
        await session.ended()
        assert await session.score() == (6.0, {"length": 4.0, "said": 2.0})
        await session.close()
    assert [key for key, _ in remote.heard] == ["job-1/0/0/0"]


@pytest.mark.parametrize(("networks", "is_reached"), [((), False), (("127.0.0.0/8",), True)])
async def test_a_service_is_reached_in_the_networks_of_the_operator_only(
    agents: str, tmp_path: Path, networks: tuple[str, ...], is_reached: bool
) -> None:
    sites = Sites(EnvironmentRegistry(tmp_path), networks)  # type: ignore[arg-type]
    with serving((200, b'{"said": 0}')) as remote:
        order = HostOrder(f"{agents}:Judged", agent={"url": remote.url})
        environment = await HostedEnvironment.open(order, boot=sites.booting(RunningHost.boot))
        try:
            session = await begun(environment)
            if is_reached:
                await session.ended()
            else:
                with pytest.raises(EnvironmentFailed, match="are not allowed for this environment"):
                    await session.ended()
            await session.close()
        finally:
            await environment.close()
    assert len(remote.heard) == is_reached


def test_an_agent_behind_a_wall_reaches_its_gateway_too(tmp_path: Path) -> None:
    sites = Sites(EnvironmentRegistry(tmp_path), ("10.0.0.0/8",), for_agents=("127.0.0.1/32",))  # type: ignore[arg-type]

    def networks(agent: dict[str, Any] | None, **config: Any) -> Any:
        return sites.placed(HostOrder("a.py:run", config, agent=agent)).networks

    assert networks({"url": "https://a.example/"}) == ("10.0.0.0/8", "127.0.0.1/32")
    assert networks({}, server="https://a.example/") == ("10.0.0.0/8", "127.0.0.1/32")
    assert networks({}) is None
    assert networks(None, server="https://a.example/") == ("10.0.0.0/8",)


async def test_they_run_in_a_service_elsewhere_too(agents: str, service: Service) -> None:
    order = HostOrder(f"{agents}:run", agent={})
    environment = await HostedEnvironment.open(order, boot=service.hosts().boot)
    try:
        session = await begun(environment)
        await session.ended()
        assert (await session.score())[0] == 4.0
        await session.close()
    finally:
        await environment.close()


async def test_a_task_is_handed_out_by_a_service_elsewhere_too(agents: str, service: Service) -> None:
    order = HostOrder(f"{agents}:Judged", agent={"pull": True})
    environment = await HostedEnvironment.open(order, boot=service.hosts().boot)
    try:
        session = await begun(environment)
        assert json.loads(await session.handed_out()) == {"word": "four"}
        await session.close()
    finally:
        await environment.close()


async def test_what_is_no_agent_says_why(host: Open) -> None:
    with pytest.raises(InvalidEnvironment, match=r"an agent is a function run\(task, llm\)"):
        await host("Judged")
