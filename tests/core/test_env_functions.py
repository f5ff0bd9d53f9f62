"""Functions as tools, a list of tasks and a reward function: the shortest form of an environment."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from gspo_core.env import (
    EnvironmentFailed,
    InvalidEnvironment,
    Message,
    PlainEnvironment,
    Timeouts,
    from_functions,
    from_trl,
    load_environment,
)
from gspo_core.env.functions import Call
from gspo_core.types import Split
from tests.core.env_kit import call, play

PRICES = {"tea": 3, "cake": 4}


@dataclass
class Parcel:
    grams: int


def price(item: str) -> int:
    """Look a price up.

    Args:
        item: what to buy
    """
    return PRICES[item]


async def order(item: str, count: int = 1) -> str:
    """Order something.

    Args:
        item: what to buy
        count: how many
    """
    await asyncio.sleep(0)
    return f"{count} x {item}"


def reward(task: Mapping[str, Any], messages: Sequence[Message], calls: Sequence[Call]) -> dict[str, float]:
    ordered = [one.arguments for one in calls if one.name == "order"]
    said = messages[-1]["content"] == "Enjoy!"
    return {"ordered": float(ordered == [{"item": task["wants"]}]), "polite": 0.5 * said}


TASKS = [{"prompt": "A tea, please.", "wants": "tea"}, {"prompt": "Cake!", "wants": "cake"}]
Shop = from_functions(
    [price, order], tasks=TASKS[:1], eval_tasks=TASKS[1:], reward=reward, system="You sell.", replayable=True
)


async def test_functions_are_tools_and_the_reward_sees_task_conversation_and_calls() -> None:
    environment = PlainEnvironment(Shop, {}, name="shop")
    assert [environment.num_tasks(split) for split in Split] == [1, 1]
    assert environment.replayable
    schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in environment.tools}
    assert schema["price"]["properties"] == {"item": {"type": "string", "description": "what to buy"}}
    assert (list(schema["order"]["properties"]), schema["order"]["required"]) == (["item", "count"], ["item"])
    turns = call("price", item="tea"), call("price", item="gold"), call("order", item="tea"), "Enjoy!"
    played = await play(environment, *turns)
    assert [message["content"] for message in played.first] == ["You sell.", "A tea, please."]
    assert [message["content"] for message in played.answers] == ["3", "error: KeyError: 'gold'", "1 x tea"]
    assert (played.reward, played.parts) == (1.5, {"ordered": 1.0, "polite": 0.5})
    assert (await play(environment, "Enjoy!", split=Split.EVAL)).parts == {"ordered": 0.0, "polite": 0.5}


async def test_an_async_reward_is_awaited_and_a_call_that_raised_is_kept() -> None:
    seen: list[Call] = []

    async def judge(task: Any, messages: Any, calls: Sequence[Call]) -> float:
        seen.extend(calls)
        return 0.25

    environment = PlainEnvironment(from_functions([price], tasks=[{"prompt": "x"}], reward=judge), {}, name="shop")
    assert (await play(environment, call("price", item="gold"), "x")).reward == 0.25
    assert (seen[0].name, seen[0].arguments, type(seen[0].error)) == ("price", {"item": "gold"}, KeyError)


async def test_a_plain_reward_leaves_the_loop_free_and_has_a_deadline() -> None:
    may_end = threading.Event()

    def slow(task: Any, messages: Any, calls: Any) -> float:
        may_end.wait(10.0)  # less than a blocked test waits
        return 1.0

    environment = PlainEnvironment(from_functions([price], tasks=[{"prompt": "x"}], reward=slow), {}, name="shop")
    session = environment.session(limits=Timeouts(score_timeout_s=0.1))
    await session.start({"prompt": "x"}, 0)
    try:
        with pytest.raises(EnvironmentFailed, match=r"timed out after 0\.1s"):
            await session.score()
        assert session.is_stuck
    finally:
        may_end.set()
        await session.close()


def test_a_task_without_a_prompt_is_refused() -> None:
    with pytest.raises(InvalidEnvironment, match=r"every task needs a prompt, \{'wants': 'tea'\} has none"):
        from_functions([price], tasks=[{"wants": "tea"}], reward=reward)


@pytest.mark.parametrize("name", ["reset", "get_reward", "tasks", "close"])
def test_a_tool_with_the_name_of_a_member_is_refused(name: str) -> None:
    """It would take the place of the member, or be offered to nobody."""

    def tool(drink: str) -> float:
        """The price of a drink."""
        return len(drink)

    tool.__name__ = name
    with pytest.raises(InvalidEnvironment, match=f"from_functions: no tool can be named {name}"):
        from_functions([tool], tasks=TASKS, reward=reward)
    with pytest.raises(InvalidEnvironment, match=f"trl: no tool can be named {name}"):
        from_trl(tools=[tool], dataset=TASKS, reward_funcs=lambda **_: [])


def test_a_tool_that_nobody_would_be_offered_is_refused() -> None:
    def _price(item: str) -> int:
        """Look a price up."""
        return len(item)

    with pytest.raises(InvalidEnvironment, match="from_functions: no tool can be named _price"):
        from_functions([_price], tasks=TASKS, reward=reward)
    trl = from_trl(tools=[_price], dataset=TASKS, reward_funcs=lambda **_: [])
    assert [one["function"]["name"] for one in trl.tools] == ["_price"]


def test_a_tool_with_the_name_of_an_attribute_is_refused() -> None:
    with pytest.raises(InvalidEnvironment, match="from_functions: price is a tool and an attribute"):
        from_functions([price], tasks=TASKS, reward=reward, price=2.0)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidEnvironment, match="from_functions: two tools are named price"):
        from_functions(iter([price, order, price]), tasks=TASKS, reward=reward)


def test_it_is_named_like_any_class() -> None:
    assert load_environment("tests.core.test_env_functions:Shop").num_tasks(Split.TRAIN) == 1


def test_a_function_that_samples_by_itself_is_named_in_the_contract_and_refused(tmp_path: Any) -> None:
    (tmp_path / "agent.py").write_text("async def rollout(task, llm):\n    return 0.0\n")
    with pytest.raises(InvalidEnvironment, match="owns its loop, an agent: write `agent: "):
        load_environment(f"{tmp_path}/agent.py:rollout")


async def test_functions_are_given_what_they_declare_and_so_is_the_reward() -> None:
    def send(on: datetime.date, to: list[Parcel]) -> str:
        """Send."""
        return f"{on:%d.%m.} {to[0].grams}"

    def reward(task: Any, messages: Any, calls: Any) -> float:
        (only,) = calls
        return float(only.arguments == {"on": datetime.date(2027, 3, 1), "to": [Parcel(5)]})

    environment = PlainEnvironment(from_functions([send], tasks=[{"prompt": "go"}], reward=reward), {}, name="f")
    played = await play(environment, call("send", on="2027-03-01", to=[{"grams": 5}]), "done")
    assert played.answers[0]["content"] == "01.03. 5"
    assert played.reward == 1.0
