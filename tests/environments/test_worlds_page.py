"""What docs/worlds.md shows, with the real packages, each in a virtual environment of its own: `make test-third-party`.

The files and jobs are those of the page; an episode of each is played through the host, as a job does it.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import EnvironmentFailed, Llm, ParsedTurn
from gspo_core.job_spec import JobSpec
from gspo_core.spec_file import load_job_spec
from gspo_core.testing import scripted_llm
from gspo_core.types import Split, StopReason
from services.gateway.dialects.turns import Refusal, RefusalKind
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.hosts.venv import requirements_of
from tests.environments.test_third_party import INTERPRETERS, begun, free_port, said, serving, turn
from tests.repo.pages import ROOT, blocks
from tests.services.gateway.fake_turns import KEY, FakeTurns, Scripted, call
from tests.services.gateway.fake_turns import serving as gateway_with

PAGE = "docs/worlds.md"
JOBS = ("verifiers.yaml", "textarena.yaml", "reasoning.yaml", "mcp.yaml", "lake.yaml", "openenv.yaml")
Open = Callable[..., Awaitable[HostedEnvironment]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the page, in the current directory."""
    for one in blocks():
        named = re.match(r'(?:"""|# )([\w.]+)', one.text)
        if one.page == PAGE and named:
            (tmp_path / named[1]).write_text(one.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[Open]:
    """The environment of a job of the page."""
    opened: list[HostedEnvironment] = []

    async def start(job: str, **changes: Any) -> HostedEnvironment:
        (entry,) = load_job_spec(folder / job).environments
        ref = entry.ref.replace("shop_agent.py", str(folder / "shop_agent.py"))
        agent = None if entry.agent is None else entry.agent.model_dump(exclude_none=True)
        order = HostOrder(ref, {**entry.config, **changes}, python=await INTERPRETERS.for_environment(ref), agent=agent)
        opened.append(await HostedEnvironment.open(order))
        return opened[-1]

    yield start
    for environment in opened:
        await environment.close()


@pytest.mark.parametrize(
    "job", ["verifiers.yaml", "textarena.yaml", "reasoning.yaml", "mcp.yaml", "lake.yaml", "openenv.yaml"]
)
def test_the_jobs_are_jobs(folder: Path, job: str) -> None:
    spec: JobSpec = load_job_spec(folder / job)
    assert spec.is_of_agents == (job == "verifiers.yaml")


def test_the_versions_of_the_page_are_those_that_the_adapters_ask_for() -> None:
    text = (ROOT / PAGE).read_text()
    for adapter in ("gym", "mcp", "reasoning_gym", "textarena", "verifiers"):
        (asked,) = requirements_of(f"environments.adapters.{adapter}:World")
        package, version = re.sub(r"\[.*\]", "", asked).split("==")
        assert f"{package} {version}" in text


# verifiers


async def agent_episode(environment: HostedEnvironment, url: str, index: int) -> Any:
    session: Any = environment.session()
    session.offer(Llm(f"{url}/v1", KEY, episode=f"episode-{index}"))
    await session.start(await environment.task(Split.TRAIN, index), index)
    return session


@pytest.mark.third_party
@pytest.mark.timeout(1200)
async def test_a_taskset_of_verifiers_plays_at_the_gateway_and_scores_itself(host: Open) -> None:
    environment = await host("verifiers.yaml")
    assert [environment.num_tasks(split) for split in Split] == [2, 1]
    assert (await environment.task(Split.TRAIN, 1))["index"] == 1
    looks, answers = Scripted(calls=(call("shop_price", {"item": "tea"}),)), Scripted("3")
    for script, parts, num_answers in (
        ([looks, answers], {"right": 1.0, "looked": 0.25}, 2.0),
        ([Scripted("5")], {"right": 0.0, "looked": 0.0}, 1.0),
        # Its own limit of turns ends it, and it is scored.
        ([looks] * 4, {"right": 0.0, "looked": 0.25}, 4.0),
    ):
        turns = FakeTurns([*script])
        async with gateway_with(turns) as gateway:
            session = await agent_episode(environment, gateway.url, 0)
            await session.ended()
            reward, found = await session.score()
            await session.close()
        assert (reward, found) == (sum(parts.values()), parts)
        assert session.metrics["num_answers"] == num_answers
        assert session.close_failure is None
        assert turns.script == []
        assert [message["content"] for message in turns.asks[0].messages] == ["Be brief.", "What is a tea?"]
        for before, after in zip(turns.asks, turns.asks[1:], strict=False):  # each goes on with the one before
            assert list(after.messages[: len(before.messages)]) == list(before.messages)
        if len(script) > 1:
            assert turns.asks[1].messages[-1]["content"] == "3"


OVER = Refusal(RefusalKind.OVER_BUDGET, f"rollout stopped: {StopReason.MAX_TURNS}")


@pytest.mark.third_party
@pytest.mark.timeout(1200)
async def test_what_a_limit_of_the_job_cut_short_is_scored_by_verifiers(host: Open) -> None:
    environment = await host("verifiers.yaml")
    looks = Scripted(calls=(call("shop_price", {"item": "tea"}),))
    for script, looked, num_answers in (([looks, looks, OVER], 1.0, 2.0), ([OVER], 0.0, 0.0)):
        turns = FakeTurns([*script])
        async with gateway_with(turns) as gateway:
            session = await agent_episode(environment, gateway.url, 0)
            await session.ended()
            assert await session.score() == (0.25 * looked, {"right": 0.0, "looked": 0.25 * looked})
            await session.close()
        assert session.metrics["num_answers"] == num_answers
        assert len(turns.asks) == len(script)


@pytest.mark.third_party
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("refusal", ["a model that nobody has", "rollout stopped: too many turns to keep: 17 MiB"])
async def test_an_episode_that_verifiers_could_not_play_has_no_reward(host: Open, refusal: str) -> None:
    environment = await host("verifiers.yaml")
    async with gateway_with(FakeTurns([Refusal(RefusalKind.INVALID, refusal)])) as gateway:
        session = await agent_episode(environment, gateway.url, 0)
        with pytest.raises(EnvironmentFailed, match=refusal) as failed:
            await session.ended()
        await session.close()
    assert failed.value.phase == "agent"
    assert KEY not in failed.value.reason


@pytest.mark.third_party
@pytest.mark.timeout(1200)
async def test_the_default_harness_runs_what_the_policy_commands_and_hides_the_key(host: Open) -> None:
    environment = await host("verifiers.yaml", env={"taskset": {"id": "shop-v1"}})
    commands = call("bash", {"command": "echo sum=$((20 + 3)); env; tr '\\0' ' ' < /proc/$PPID/environ"})
    turns = FakeTurns([Scripted(calls=(commands,)), Scripted(calls=(call("shop_price", {"item": "tea"}),))])
    turns.script.append(Scripted("3"))
    async with gateway_with(turns) as gateway:
        session = await agent_episode(environment, gateway.url, 0)
        await session.ended()
        assert await session.score() == (1.25, {"right": 1.0, "looked": 0.25})
        await session.close()
    first, second, third = turns.asks
    assert {tool["function"]["name"] for tool in first.tools} == {"bash", "edit", "shop_price"}
    shown, price = (str(ask.messages[-1]["content"]) for ask in (second, third))
    assert "sum=23" in shown
    assert "PATH=" in shown
    assert KEY not in shown
    assert price == "3"
    for before, after in zip(turns.asks, turns.asks[1:], strict=False):
        assert list(after.messages[: len(before.messages)]) == list(before.messages)


JUDGED = """
import verifiers.v1 as vf

class JudgedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()

class JudgedEnv(vf.Env[JudgedConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.judge.run(task)

__all__ = ["JudgedEnv"]
"""
NULL = {"harness": {"id": "null"}}


@pytest.mark.third_party
@pytest.mark.timeout(1200)
async def test_several_agents_of_verifiers_are_one_episode(host: Open, folder: Path) -> None:
    shop = {"taskset": {"id": "shop-v1"}}
    environment = await host("verifiers.yaml", env={**shop, "id": "best-of-n", "n": 2, "agent": NULL}, shuffle=2)
    rows = [await environment.task(Split.TRAIN, index) for index in range(2)]
    assert len(rows) == 2
    async with gateway_with(FakeTurns([Scripted("nothing"), Scripted("nothing")])) as gateway:
        session = await agent_episode(environment, gateway.url, 0)
        await session.ended()
        assert (await session.score())[1] == {"agent/right": 0.0, "agent/looked": 0.0}
        await session.close()
    assert session.metrics["best"] == 1.0

    (folder / "judged_v1.py").write_text(JUDGED)
    environment = await host("verifiers.yaml", env={**shop, "id": "judged-v1", "solver": NULL, "judge": NULL})
    async with gateway_with(FakeTurns([Scripted("3"), Scripted("right")])) as gateway:
        session = await agent_episode(environment, gateway.url, 0)
        with pytest.raises(EnvironmentFailed, match="judge is not to be trained, so it needs another model"):
            await session.ended()
        await session.close()
    with scripted_llm("it is right") as judge:
        own = {**NULL, "client": {"type": "eval", "base_url": judge.base_url, "api_key_var": "NOBODYS_KEY"}}
        environment = await host("verifiers.yaml", env={**shop, "id": "judged-v1", "solver": NULL, "judge": own})
        async with gateway_with(FakeTurns([Scripted("3")])) as gateway:
            session = await agent_episode(environment, gateway.url, 0)
            await session.ended()
            assert await session.score() == (1.0, {"right": 1.0, "looked": 0.0})
            await session.close()
        assert len(judge.requests) == 1


# TextArena


async def guessed(environment: HostedEnvironment, index: int) -> tuple[list[str], float]:
    """By bisection; what the game said, and the reward."""
    session, first = await begun(environment, index)
    told, low, high = [first], 1, 20
    for _ in range(10):
        middle = (low + high) // 2
        observation = await session.act(ParsedTurn(f"[{middle}]"))
        if observation.done:
            break
        told.append(said(observation))
        low, high = (middle + 1, high) if "higher" in told[-1] else (low, middle - 1)
    reward, _ = await session.score()
    await session.close()
    return told, reward


@pytest.mark.third_party
@pytest.mark.timeout(600)
async def test_games_of_textarena_do_not_disturb_each_other(host: Open) -> None:
    environment = await host("textarena.yaml")
    assert environment.num_tasks(Split.TRAIN) == 500
    alone = [await guessed(environment, index) for index in range(4)]
    together = await asyncio.gather(*(guessed(environment, index) for index in range(4)))
    assert together == alone
    assert [reward for _, reward in alone] == [1.0] * 4
    assert len({tuple(told) for told, _ in alone}) > 1
    assert "[" not in "".join(text for told, _ in alone for text in told[1:])  # no echo of the policy's moves


@pytest.mark.third_party
@pytest.mark.timeout(600)
async def test_games_that_draw_at_every_move_do_not_disturb_each_other_in_one_process(host: Open) -> None:
    environment = await host("textarena.yaml", id="2048-v0")

    async def moved(index: int) -> list[str]:
        session, first = await begun(environment, index)
        told = [first]
        for move in ("[up]", "[left]", "[down]", "[right]") * 3:
            told.append(said(await session.act(ParsedTurn(move))))
            await asyncio.sleep(0)
        await session.close()
        return told

    alone = [await moved(index) for index in range(4)]
    assert await asyncio.gather(*(moved(index) for index in range(4))) == alone
    assert len({tuple(told) for told in alone}) == 4


@pytest.mark.third_party
async def test_a_game_that_a_limit_ends_is_worth_nothing_and_not_unknown(host: Open) -> None:
    environment = await host("textarena.yaml")
    session, first = await begun(environment, 0)
    assert "between 1 and 20" in first
    await session.act(ParsedTurn("[1]"))
    assert await session.score() == (0.0, {})
    await session.close()


@pytest.mark.third_party
async def test_a_game_of_two_is_played_against_a_function(host: Open, folder: Path) -> None:
    (folder / "rival.py").write_text(
        "import re\n"
        "def first_free(said):\n    return re.findall(r\"'(\\[\\d\\])'\", said)[-1]\n"
        "def fails(said):\n    raise OSError('asleep')\n"
    )
    sys_path = {"id": "TicTacToe-v0", "opponent": "rival:first_free"}
    environment = await at_folder(folder, sys_path)
    session, _ = await begun(environment, 0)
    for square in (0, 1, 2):
        observation = await session.act(ParsedTurn(f"[{square}]"))
    assert observation.stop_reason is StopReason.ENV_DONE
    assert await session.score() == (1.0, {})
    await session.close()
    await environment.close()

    failing = await at_folder(folder, {"id": "TicTacToe-v0", "opponent": "rival:fails"})
    session, _ = await begun(failing, 0)
    await session.act(ParsedTurn("[0]"))
    with pytest.raises(EnvironmentFailed, match="asleep"):
        await session.score()
    await session.close()
    await failing.close()


async def at_folder(folder: Path, config: Mapping[str, Any]) -> HostedEnvironment:
    """With modules of the folder, as those that are installed with the workers are found."""
    ref = "environments.adapters.textarena:game"
    order = HostOrder(ref, config, python=await INTERPRETERS.for_environment(ref), paths=[str(folder)])
    return await HostedEnvironment.open(order)


# reasoning-gym


@pytest.mark.third_party
@pytest.mark.timeout(600)
async def test_a_mixture_of_data_sets_is_scored_by_each_of_them(host: Open) -> None:
    environment = await host("reasoning.yaml")
    kinds: Counter[str] = Counter()
    for index in range(12):
        session, question = await begun(environment, index)
        is_legs = "legs" in question
        kinds["legs" if is_legs else "sums"] += 1
        await session.act(ParsedTurn(f"<answer>{answer_to(question)}</answer>" if not is_legs else "no idea"))
        assert (await session.score())[0] == (0.0 if is_legs else 1.0)
        await session.close()
    assert set(kinds) == {"legs", "sums"}


def answer_to(question: str) -> int:
    """Of a sum as basic_arithmetic writes it."""
    (terms,) = re.findall(r"([-\d+*/() ]*\d[-\d+*/() ]*)(?:\s*=|\.|\?|$)", question.rstrip())[:1]
    return int(eval(terms))


# MCP

OLD_DESK = """
# /// script
# dependencies = ["mcp==1.30.0"]
# ///
import os
from importlib.metadata import version
from mcp.server.fastmcp import FastMCP

server = FastMCP("desk")

@server.tool()
def greet(name: str) -> str:
    "Greet somebody."
    return f"{os.environ['GREETING']}, {name}"

@server.tool()
def about() -> str:
    "Where this runs."
    return f"{version('mcp')} in {os.path.basename(os.getcwd())}, {sorted(set(os.environ) & {'GSPO_REDIS_URL'})}"

if __name__ == "__main__":
    server.run()
"""


@pytest.mark.third_party
@pytest.mark.timeout(600)
async def test_a_server_of_mcp_has_its_own_packages_environment_and_folder(
    host: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_REDIS_URL", "redis://secret")
    (folder / "desk").mkdir()
    (folder / "desk" / "desk.py").write_text(OLD_DESK)
    python = await INTERPRETERS.for_environment(f"{folder}/desk/desk.py:server")
    assert python != sys.executable
    environment = await host("mcp.yaml", command=[python, "desk.py"])
    session, prompt = await begun(environment, 0)
    assert prompt == "Greet Ada."
    assert said(await session.act(turn(("about", {})))) == "1.30.0 in desk, []"
    assert said(await session.act(turn(("greet", {"name": "Ada"})))) == "Good morning, Ada"
    assert (await session.act(ParsedTurn("Done."))).stop_reason is StopReason.COMPLETED
    assert await session.score() == (1.0, {})
    await session.close()


HEADERS = """
import sys
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

server = MCPServer("desk")

@server.tool()
def greet(name: str, ctx: Context) -> str:
    "Greet somebody."
    return f"{ctx.headers['x-team']}, {name}"

server.run("streamable-http", port=int(sys.argv[1]))
"""


@pytest.mark.third_party
@pytest.mark.timeout(600)
async def test_headers_reach_a_server_of_mcp_behind_a_url(host: Open, folder: Path) -> None:
    (folder / "remote_desk.py").write_text(HEADERS)
    port = free_port()
    python = await INTERPRETERS.for_environment("environments.adapters.mcp:Mcp")
    async with serving(python, folder / "remote_desk.py", port):
        changes = {"command": [], "environment": {}, "cwd": "", "headers": {"X-Team": "red"}}
        environment = await host("mcp.yaml", **changes, url=f"http://127.0.0.1:{port}/mcp")
        session, _ = await begun(environment, 0)
        assert said(await session.act(turn(("greet", {"name": "Ada"})))) == "red, Ada"
        await session.close()


# Gymnasium


@pytest.mark.third_party
@pytest.mark.timeout(600)
async def test_the_lake_of_the_page_is_crossed(host: Open) -> None:
    environment = await host("lake.yaml")
    session, _ = await begun(environment, 0)
    for action in ("right", "right", "down", "down", "down", "right"):
        observation = await session.act(turn(("act", {"action": action})))
    assert observation.stop_reason is StopReason.ENV_DONE
    assert await session.score() == (1.0, {})
    await session.close()


# OpenEnv


@pytest.mark.third_party
@pytest.mark.timeout(600)
async def test_a_server_of_openenv_is_named_by_its_address(host: Open) -> None:
    adder = Path(__file__).with_name("openenv_server.py")
    port = free_port()
    async with serving(await INTERPRETERS.for_environment(f"{adder}:Adder"), adder, port, "2"):
        environment = await host("openenv.yaml", url=f"ws://127.0.0.1:{port}/ws")
        session, _ = await begun(environment, 5)
        observation = await session.act(turn(("step", {"amount": 5})))
        assert (await session.score())[0] + (observation.reward or 0.0) == 1.0
        await session.close()
