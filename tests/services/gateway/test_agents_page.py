"""What docs/agents.md shows works as it stands there, and so does the agent of the examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.calculator import Calculator
from examples.agent.agent import CALCULATE
from gspo_core.cli import main
from gspo_core.env import AgentStart, Llm, load_environment
from gspo_core.spec import JobSpec
from gspo_core.spec_file import load_job_spec
from gspo_core.types import Split
from tests.repo.pages import ROOT, block
from tests.services.gateway.fake_turns import KEY, FakeTurns, Scripted, call, serving

PAGE = "docs/agents.md"


async def played(ref: str, turns: FakeTurns, index: int = 0) -> float:
    """The reward of an episode whose turns are scripted."""
    environment = load_environment(ref, agent=AgentStart())
    async with serving(turns) as gateway:
        session = environment.session()
        session.offer(Llm(f"{gateway.url}/v1", KEY))
        try:
            await session.start(await environment.task(Split.TRAIN, index), seed=0)
            await session.ended()
            return (await session.score())[0]
        finally:
            await session.close()


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
    agents, demos = (load_job_spec(ROOT / "examples" / name / "job.yaml") for name in ("agent", "demo"))
    assert agents.is_of_agents
    same = {"name": "", "environments": demos.environments}
    assert agents.model_copy(update=same) == demos.model_copy(update=same)
