"""Other people's worlds, the real ones: each adapter in a virtual environment of its own, through the host.

`make test-third-party` installs what the adapters ask for, once, below `.make/venvs`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_core.env import CallStatus, Observation, ParsedTurn, Session, ToolCall
from gspo_core.types import Split, StopReason
from services.host_process import HostOrder
from services.host_venv import Interpreters
from services.hosted import HostedEnvironment

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
