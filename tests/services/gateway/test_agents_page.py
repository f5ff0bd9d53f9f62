"""What docs/agents.md shows works as it stands there, and so does the agent of the examples."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import httpx
import pytest

from environments.calculator import Calculator
from examples.agent.agent import CALCULATE
from examples.agent.questions import Questions
from gspo_core.cli import main
from gspo_core.env import AgentEnvironment, AgentStart, Llm, load_environment
from gspo_core.spec import JobSpec
from gspo_core.spec_file import load_job_spec
from gspo_core.types import Split
from services.state.functions import Functions
from services.state.jobs import JobStatus
from services.state.loans import Loans
from services.state.queue import Bus
from services.state.server import RedisServer
from services.state.store import Store
from tests.core.acp_kit import acp_reward, write_acp_agent
from tests.patience import HANG_S
from tests.repo.pages import ROOT, block
from tests.services.api.api_kit import ApiProcess
from tests.services.gateway.fake_turns import KEY, FakeTurns, Scripted, call, serving

PAGE = "docs/agents.md"


async def played(ref: str, turns: FakeTurns, index: int = 0) -> float:
    """The reward of an episode whose turns are scripted."""
    environment = load_environment(ref, agent=AgentStart())
    assert isinstance(environment, AgentEnvironment)
    client: httpx.Client = environment.home.client  # type: ignore[attr-defined]
    async with serving(turns) as gateway:
        session = environment.session()
        session.offer(Llm(f"{gateway.url}/v1", KEY))
        try:
            await session.start(await environment.task(Split.TRAIN, index), seed=0)
            await session.ended()
            return (await session.score())[0]
        finally:
            await session.close()
            await asyncio.to_thread(client.close)


@pytest.mark.parametrize(("said", "reward"), [("2", 1.0), ("3", 0.0)])
async def test_the_agent_of_the_page_asks_and_is_judged(tmp_path: Path, said: str, reward: float) -> None:
    (tmp_path / "guess.py").write_text(block(PAGE, '"""guess.py"""').text)
    turns = FakeTurns([Scripted(said)])
    assert await played(f"{tmp_path}/guess.py:run", turns) == reward
    assert turns.asks[0].messages[0]["content"] == "What comes after 1? Answer with the number only."


def test_the_agent_of_the_page_is_examined_and_its_job_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "guess.py").write_text(block(PAGE, '"""guess.py"""').text)
    (tmp_path / "guess.yaml").write_text(block(PAGE, "# guess.yaml").text)
    monkeypatch.chdir(tmp_path)
    program, *arguments = block(PAGE, "gspo env validate").typed.split()
    assert program == "gspo"
    assert main(arguments) == 0
    assert "89 to train, 10 held out" in capsys.readouterr().out
    spec: JobSpec = load_job_spec(tmp_path / "guess.yaml")
    assert spec.is_of_agents


def test_the_judge_of_the_page_is_asked_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "guess.py").write_text(block(PAGE, '"""guess.py"""').text)
    (tmp_path / "judged.yaml").write_text(block(PAGE, "# judged.yaml").text)
    monkeypatch.chdir(tmp_path)
    (entry,) = load_job_spec(tmp_path / "judged.yaml").environments
    assert entry.agent is not None
    assert entry.agent.judge is not None
    asked = entry.agent.judge.ask(lambda: "THE MESSAGES", "", {"number": 7})
    assert asked.startswith("Somebody was asked what comes after 7. ")
    assert "THE MESSAGES" in asked
    assert entry.agent.judge.score('{"score": 0.5}') == 0.5
    given = entry.agent.model_dump_json(exclude_none=True)
    assert main(["env", "validate", entry.ref, "--agent", given]) == 0
    assert "by a-model of api.example" in capsys.readouterr().out
    assert main(["env", "validate", entry.ref, "--agent", given.replace("task.number", "task.digit")]) == 1
    assert "the task has no field digit" in capsys.readouterr().out


@pytest.mark.parametrize(("written", "reward"), [("2\n3\n5\n", 1.0), ("2\n3\n4\n", 0.0)])
async def test_the_coding_agent_of_the_page_is_asked_and_judged(tmp_path: Path, written: str, reward: float) -> None:
    """By a program that speaks the protocol, in place of the one that the page names."""
    (tmp_path / "primes.py").write_text(block(PAGE, '"""primes.py"""').text)
    (tmp_path / "coding.yaml").write_text(block(PAGE, "# coding.yaml").text)
    (entry,) = load_job_spec(tmp_path / "coding.yaml").environments
    assert entry.agent is not None
    path = "os.environ['GSPO_FOLDER'] + '/primes.txt'"
    agent = write_acp_agent(
        tmp_path,
        "def prompt(text):\n    assert text == 'Write the first 3 primes into primes.txt, one in a line.'\n"
        f"    assert ask('fs/write_text_file', path={path}, content={written!r}) == {{}}",
    )
    start = AgentStart.from_json(entry.agent.model_dump(exclude_none=True) | {"command": agent})
    environment = load_environment(f"{tmp_path}/{entry.ref}", agent=start)
    assert await acp_reward(environment) == reward


def test_the_rewards_of_the_page_are_a_part_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(block(PAGE, '"""guess.py"""').text)
    (tmp_path / "guess.yaml").write_text(block(PAGE, "# guess.yaml").text + block(PAGE, "rewards:\n").text)
    spec: JobSpec = load_job_spec(tmp_path / "guess.yaml")
    assert (spec.rewards.deadline_s, spec.rewards.on_late_reward) == (7200, "train")


async def test_the_loop_of_the_page_fetches_and_plays(
    tmp_path: Path, redis_server: RedisServer, store: Store, bus: Bus
) -> None:
    for name in ("guess.py", "fetch.py"):
        (tmp_path / name).write_text(block(PAGE, f'"""{name}"""').text)
    turns = FakeTurns([Scripted("2"), Scripted("7")])
    loans = Loans(Functions(bus._redis))
    async with serving(turns) as gateway:
        with ApiProcess(redis_server.url) as api:
            environments = [{"ref": "guess.py:run", "agent": {"pull": True}}]
            job = (await store.jobs.create(json.dumps({"model": "m", "environments": environments}))).id
            claim = await store.jobs.claim("trainer")
            assert claim is not None
            await bus.dispatch(job, claim.token, 0, size=2, split=Split.TRAIN, task_index=0)
            token = await bus.join("gateway-0")
            for lease in await bus.lease(job, "gateway-0", token, 2):
                told = {"task": {"number": 1}, "base_url": f"{gateway.url}/v1", "api_key": KEY, "model": "policy"}
                await loans.offer(lease.key, token, 0, json.dumps(told).encode())
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "GSPO_URL": api.url}
            loop = await asyncio.create_subprocess_exec(
                sys.executable, "fetch.py", job, cwd=tmp_path, env=environment, stderr=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(HANG_S):
                while [one and one.reward for one in (await loans.offers(job)).values()] != [1.0, 0.0]:
                    assert loop.returncode is None
                    await asyncio.sleep(0.05)
                await store.jobs.set_status(job, JobStatus.FAILED)
                _, error = await loop.communicate()
    assert (loop.returncode, error) == (0, b"")


async def test_the_agent_of_the_examples_uses_its_tool_and_is_judged() -> None:
    expression = Calculator.tasks[0]["expression"]
    answer = str(Calculator.oracle(expression)[1])
    turns = FakeTurns(
        [
            Scripted(calls=(call("calculate", {"expression": expression}), call("calculate", {"expression": "("}))),
            Scripted(answer),
        ]
    )
    assert await played("examples.agent.agent:run", turns) == 1.0
    *_, result, error = turns.asks[1].messages
    assert (result["content"], error["content"]) == (answer, "error: not an expression")


def test_the_agent_of_the_examples_shows_the_policy_what_the_demo_does() -> None:
    """So that a model which was taught for the one can play the other."""
    environment = load_environment("environments.calculator:Calculator")
    assert list(environment.tools) == [CALCULATE]
    demo = load_job_spec(ROOT / "examples" / "demo" / "job.yaml")
    same = {"name": "", "environments": demo.environments}
    for name in ("job.yaml", "job_service.yaml"):
        agents = load_job_spec(ROOT / "examples" / "agent" / name)
        assert agents.is_of_agents
        assert agents.model_copy(update=same) == demo.model_copy(update=same)


async def test_the_answers_of_the_service_are_judged_by_what_was_asked() -> None:
    (entry,) = load_job_spec(ROOT / "examples" / "agent" / "job_service.yaml").environments
    assert entry.agent is not None
    environment = load_environment(entry.ref, agent=AgentStart(url=entry.agent.url))
    assert [environment.num_tasks(split) for split in Split] == [len(Calculator.tasks), len(Calculator.eval_tasks)]
    task = Calculator.tasks[0]
    right = str(Calculator.oracle(task["expression"])[1])
    assert [Questions().get_reward(task, {"answer": said}) for said in (f" {right}\n", f"{right}0", "")] == [
        1.0,
        0.0,
        0.0,
    ]
