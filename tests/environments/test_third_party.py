"""Other people's worlds, the real ones: each adapter in a virtual environment of its own, through the host.

`make test-third-party` installs what the adapters ask for, once, below `.make/venvs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import CallStatus, EnvironmentFailed, Observation, ParsedTurn, Session, Timeouts, ToolCall
from gspo_core.types import Split, StopReason
from services.hosts.openenv_server import serve
from services.hosts.server import HostOrder
from services.hosts.session import HostedEnvironment
from services.hosts.venv import Interpreters

pytestmark = pytest.mark.third_party

ROOT = Path(__file__).parents[2]
INTERPRETERS = Interpreters(ROOT / ".make" / "venvs", may_install=True)

Open = Callable[..., Awaitable[HostedEnvironment]]


@pytest.fixture
def counts() -> Counter[str]:
    return Counter()


@pytest.fixture
async def host(counts: Counter[str]) -> AsyncIterator[Open]:
    opened: list[HostedEnvironment] = []

    async def start(ref: str, **config: Any) -> HostedEnvironment:
        def count(name: str) -> None:
            counts[name] += 1

        python = await INTERPRETERS.for_environment(ref)
        opened.append(await HostedEnvironment.open(HostOrder(ref, config, python=python), count))
        return opened[-1]

    yield start
    for environment in opened:
        await environment.close()


def turn(given: str | tuple[str, dict[str, Any]]) -> ParsedTurn:
    if isinstance(given, str):
        return ParsedTurn(given)
    return ParsedTurn("", (ToolCall(given[0], given[1], CallStatus.OK, "", 0, 1),))


async def begun(environment: HostedEnvironment, index: int, split: Split = Split.TRAIN) -> tuple[Session, str]:
    session = environment.session()
    start = await session.start(await environment.task(split, index), index)
    return session, str(start.messages[-1]["content"])


def said(observation: Observation) -> str:
    return str(observation.messages[-1]["content"])


# Gymnasium

LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}


async def test_frozen_lake_is_crossed(host: Open) -> None:
    environment = await host("environments.adapters.gym:gym", **LAKE, options={"is_slippery": False}, show="render")
    (tool,) = environment.tools
    assert tool["function"]["parameters"]["properties"]["action"]["enum"] == LAKE["actions"]
    session, first = await begun(environment, 0)
    assert first.split() == ["SFFF", "FHFH", "FFFH", "HFFG"]
    for action in ("right", "right", "down", "down", "down"):
        observation = await session.act(turn(("act", {"action": action})))
        assert not observation.done
    observation = await session.act(turn(("act", {"action": "right"})))
    assert (observation.done, observation.stop_reason) == (True, StopReason.ENV_DONE)
    assert await session.score() == (1.0, {})
    await session.close()


async def test_a_seed_decides_where_the_ice_leads_and_nobody_acts_after_the_end(host: Open) -> None:
    environment = await host("environments.adapters.gym:gym", **LAKE, replayable=True)
    walks = []
    for index in (3, 3, 4):
        session, _ = await begun(environment, index, Split.EVAL)
        walk = []
        for _ in range(100):
            observation = await session.act(turn(("act", {"action": "right"})))
            walk.append(said(observation))
            if observation.done:
                break
        assert observation.done
        assert "the game is over" in said(await session.act(turn(("act", {"action": "right"}))))
        assert "fly" in said(await session.act(turn(("act", {"action": "fly"}))))
        walks.append(walk)
        await session.close()
    assert walks[0] == walks[1]
    assert walks[0] != walks[2]


# reasoning-gym


@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "prime_factorization"])
async def test_data_sets_of_reasoning_gym_are_scored_by_themselves(host: Open, name: str) -> None:
    environment = await host("environments.adapters.reasoning_gym:ReasoningGym", name=name, num_tasks=20)
    assert [environment.num_tasks(split) for split in Split] == [20, 100]
    questions = set()
    for index, right in enumerate(await asyncio.to_thread(right_answers, name, 5)):
        answers = {"right": f"<answer> {right} </answer>", "wrong": "<answer>zzz</answer>", "none": "no idea"}
        rewards = {}
        for kind, answer in answers.items():
            session, question = await begun(environment, index)
            questions.add(question)
            assert (await session.act(turn(f"Well. {answer}"))).stop_reason is StopReason.COMPLETED
            rewards[kind], _ = await session.score()
            await session.close()
        assert rewards["right"] == 1.0
        assert rewards["wrong"] <= 0.01
        assert rewards["none"] == 0.0
    assert len(questions) >= 4


def right_answers(name: str, number: int) -> list[str]:
    """Asked of the package itself, in its own interpreter."""
    program = (
        f"import json, reasoning_gym; items = reasoning_gym.create_dataset({name!r}, seed=0, size=20); "
        f"print(json.dumps([items[index]['answer'] for index in range({number})]))"
    )
    python = INTERPRETERS.find("environments.adapters.reasoning_gym:ReasoningGym")
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


# MCP

SHOP = Path(__file__).with_name("mcp_server.py")
MCP = "environments.adapters.mcp:Mcp"


def shop(**changes: Any) -> dict[str, Any]:
    tasks = [{"prompt": f"Order tea for {3 * cups} dollars.", "price": 3 * cups} for cups in range(1, 5)]
    command = [INTERPRETERS.find(MCP), str(SHOP)]
    return {"command": command, "reward": f"{SHOP}:reward", "tasks": tasks, "system": "Be kind."} | changes


async def visit(environment: HostedEnvironment, index: int) -> dict[str, float]:
    session, prompt = await begun(environment, index)
    assert prompt == f"Order tea for {3 * (index + 1)} dollars."
    assert said(await session.act(turn(("order", {"drink": "wine"})))).startswith("error:")
    assert said(await session.act(turn(("order", {"drink": 7})))).startswith("error:")
    assert "unknown tool" in said(await session.act(turn(("steal", {}))))
    answer = said(await session.act(turn(("order", {"drink": "tea", "cups": index + 1}))))
    assert answer == f"{3 * (index + 1)} dollars"
    assert (await session.act(turn("thank you"))).stop_reason is StopReason.COMPLETED
    reward, parts = await session.score()
    assert reward == sum(parts.values())
    await session.close()
    assert session.close_failure is None
    return parts


async def test_a_server_of_mcp_over_stdio(host: Open) -> None:
    environment = await host(MCP, **shop())
    assert [tool["function"]["name"] for tool in environment.tools] == ["order", "wait"]
    assert environment.tools[0]["function"]["parameters"]["required"] == ["drink"]
    assert (
        await asyncio.gather(*(visit(environment, index) for index in range(4))) == [{"ordered": 1.0, "said": 1.0}] * 4
    )


async def test_a_tool_of_mcp_that_hangs_is_the_policys_own_outcome(host: Open) -> None:
    environment = await host(MCP, **shop())
    session = environment.session(limits=Timeouts(step_timeout_s=1.0))
    await session.start(await environment.task(Split.TRAIN, 0), 0)
    observation = await session.act(turn(("wait", {"seconds": 60})))
    assert observation.stop_reason is StopReason.TOOL_TIMEOUT
    assert (await session.score())[0] == 0.0
    await session.close()


async def test_a_server_of_mcp_over_http(host: Open) -> None:
    port = free_port()
    async with serving(INTERPRETERS.find(MCP), SHOP, port):
        environment = await host(MCP, **shop(command=[], url=f"http://127.0.0.1:{port}/mcp"))
        assert await visit(environment, 1) == {"ordered": 1.0, "said": 1.0}


# OpenEnv

ADDER = Path(__file__).with_name("openenv_server.py")
OPENENV = "environments.adapters.openenv:OpenEnv"


async def test_sixteen_episodes_on_a_server_of_openenv_that_holds_two(host: Open, counts: Counter[str]) -> None:
    port = free_port()
    async with serving(await INTERPRETERS.for_environment(f"{ADDER}:Adder"), ADDER, port, "2"):
        environment = await host(OPENENV, url=f"ws://127.0.0.1:{port}/ws", num_tasks=40, reward_range=[0.0, 1.0])
        (tool,) = environment.tools
        assert list(tool["function"]["parameters"]["properties"]) == ["amount"]

        async def play(index: int) -> float:
            session, prompt = await begun(environment, index)
            assert f"Reach {index}." in prompt
            assert "positive" in said(await session.act(turn(("step", {"amount": 0}))))
            first = await session.act(turn(("step", {"amount": 1})))
            assert not first.done
            last = await session.act(turn(("step", {"amount": index - 1})))
            assert (last.done, last.stop_reason) == (True, StopReason.ENV_DONE)
            score, _ = await session.score()
            await session.close()
            assert session.close_failure is None
            return score + (last.reward or 0.0)

        assert await asyncio.gather(*(play(index) for index in range(2, 18))) == [1.0] * 16
        assert environment.capacity == 2
        assert counts["host/at_capacity"] > 0
        assert counts["host/broken_by_policy"] == 0


async def test_a_server_of_openenv_that_dies_is_nobodys_reward(host: Open) -> None:
    port = free_port()
    async with serving(await INTERPRETERS.for_environment(f"{ADDER}:Adder"), ADDER, port, "2"):
        environment = await host(OPENENV, url=f"ws://127.0.0.1:{port}/ws")
        session, _ = await begun(environment, 5)
    with pytest.raises(EnvironmentFailed):
        await session.act(turn(("step", {"amount": 1})))
    await session.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def serving(python: str, script: Path, port: int, *arguments: str) -> AsyncIterator[None]:
    """A server that answers, until the block ends."""
    process = await asyncio.create_subprocess_exec(python, str(script), str(port), *arguments)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            assert process.returncode is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            await asyncio.sleep(0.1)
        yield
    finally:
        process.kill()
        await process.wait()


FOREIGN_CLIENT = """
import asyncio, sys
from openenv.core.generic_client import GenericEnvClient

async def main():
    async with GenericEnvClient(base_url=sys.argv[1]) as client:
        first = await client.reset(seed=0)
        assert first.observation["text"].startswith("What is "), first
        call = {"type": "call_tool", "tool_name": "calculate", "arguments": {"expression": "6 * 7"}}
        step = await client.step(call)
        assert step.observation["result"]["content"][0]["text"] == "42", step
        last = await client.step({"type": "message", "text": "no idea"})
        assert (last.reward, last.done) == (0.0, True), last
        print("played")

asyncio.run(main())
"""


async def test_openenvs_own_client_plays_an_environment_of_ours(host: Open) -> None:
    port = free_port()
    environment = await host("environments.calculator:Calculator")
    ready = asyncio.Event()
    task = asyncio.create_task(serve(environment, "127.0.0.1", port, 4, ready))
    await asyncio.wait_for(ready.wait(), 20)
    python = await INTERPRETERS.for_environment(f"{ADDER}:Adder")
    program = (python, "-c", FOREIGN_CLIENT, f"http://127.0.0.1:{port}")
    client = await asyncio.create_subprocess_exec(*program, stdout=subprocess.PIPE)
    printed, _ = await client.communicate()
    task.cancel()
    await asyncio.wait({task})
    assert printed.strip() == b"played"


# gsm8k as the hub has it

HUB_GSM8K = """
# /// script
# dependencies = ["pyarrow==26.0.1"]
# ///
from environments.gsm8k import GSM8K
"""
WRITE = """
import sys, pyarrow, pyarrow.parquet
rows = [{"question": f"{n} + {n}?", "answer": f"<<{n}+{n}={2 * n}>>\\n#### {2 * n}"} for n in range(5)]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[: int(sys.argv[2])]), sys.argv[1])
"""


async def test_gsm8k_is_read_from_the_files_of_the_hub(host: Open, tmp_path: Path) -> None:
    (tmp_path / "hub_gsm8k.py").write_text(HUB_GSM8K)
    (tmp_path / "main").mkdir()
    ref = f"{tmp_path}/hub_gsm8k.py:GSM8K"
    python = await INTERPRETERS.for_environment(ref)
    assert python is not None
    for split, number in (("train", 5), ("test", 2)):
        table = tmp_path / "main" / f"{split}-00000-of-00001.parquet"
        await asyncio.to_thread(subprocess.run, [python, "-c", WRITE, str(table), str(number)], check=True)
    environment = await host(ref, path=str(tmp_path))
    assert [environment.num_tasks(split) for split in Split] == [5, 2]
    session, question = await begun(environment, 3)
    assert question == "3 + 3?"
    assert (await session.act(turn("#### 6"))).done
    assert await session.score() == (1.0, {})
    await session.close()
