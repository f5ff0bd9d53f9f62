"""The calculator as an environment: its arithmetic, its tasks, and whole episodes of an oracle and of others."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.calculator import NUM_EVAL_TASKS, NUM_TRAIN_TASKS, Calculator, evaluate
from gspo_core.env import CallStatus, Observation, ParsedTurn, ToolCall, load_environment
from gspo_core.types import Split, StopReason

REF = "environments.calculator:Calculator"


def expressions(depth: int = 3) -> st.SearchStrategy[tuple[str, int]]:
    """Pairs of an expression and its value, worked out without parsing."""
    numbers = st.integers(0, 99).map(lambda number: (str(number), number))
    return st.recursive(
        numbers,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: (f"({pair[0][0]}) + {pair[1][0]}", pair[0][1] + pair[1][1])),
            st.tuples(inner, inner).map(lambda pair: (f"({pair[0][0]})-({pair[1][0]})", pair[0][1] - pair[1][1])),
            st.tuples(inner, inner).map(lambda pair: (f"({pair[0][0]}) * ({pair[1][0]})", pair[0][1] * pair[1][1])),
            inner.map(lambda one: (f"-({one[0]})", -one[1])),
        ),
        max_leaves=depth,
    )


@given(expressions())
def test_values_are_right(expression: tuple[str, int]) -> None:
    text, value = expression
    assert evaluate(text) == value


def test_products_bind_before_sums_and_the_left_before_the_right() -> None:
    assert evaluate("2 + 3 * 4") == 14
    assert evaluate("9 - 5 - 2") == 2
    assert evaluate(" 7 ") == 7


@pytest.mark.parametrize(
    "expression",
    [
        *("", "(", "2 +", "2 3", "2 ** 9", "7 / 2", "7 // 2", "7 % 2", "1.5", "1e3", "True", "None", "'a'", "2 < 3"),
        *("x", "__import__('os')", "abs(1)", "(1, 2)", "[1]", "lambda: 1", "1 if 1 else 2", "x := 1", "\0", "~1", "+1"),
        "9" * 61,
    ],
)
def test_anything_else_is_refused_in_words(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|known|null"):
        evaluate(expression)


@given(st.text(max_size=80) | st.text("0123456789+-*() .", max_size=80))
def test_whatever_is_written_is_a_number_or_a_value_error(expression: str) -> None:
    try:
        assert type(evaluate(expression)) is int
    except ValueError:
        return


def test_tasks_are_many_distinct_and_held_out_ones_are_not_among_the_others() -> None:
    train = [task["expression"] for task in Calculator.tasks]
    held_out = [task["expression"] for task in Calculator.eval_tasks]
    assert (len(train), len(held_out)) == (NUM_TRAIN_TASKS, NUM_EVAL_TASKS) == (2000, 200)
    assert len({*train, *held_out}) == 2200
    assert {operator for expression in train for operator in expression.split()[1::2]} == set("+-*")
    assert {len(expression.split()) for expression in held_out} == {3, 5}


def test_tasks_are_the_same_in_every_process() -> None:
    assert [task["expression"] for task in Calculator.tasks[:3]] == ["78 * 61", "69 * 40", "88 + 85 * 26"]


def turn(text: str = "", expression: Any = None) -> ParsedTurn:
    if expression is None:
        return ParsedTurn(text)
    return ParsedTurn(text, (ToolCall("calculate", {"expression": expression}, CallStatus.OK, "", 0, 1),))


async def play(split: Split, index: int, *turns: ParsedTurn) -> tuple[float, list[Observation]]:
    environment = load_environment(REF)
    session = environment.session()
    await session.start(await environment.task(split, index), seed=0)
    observations = [await session.act(one) for one in turns]
    reward, _ = await session.score()
    await session.close()
    return reward, observations


@pytest.mark.parametrize("split", list(Split))
async def test_an_oracle_is_always_right(split: Split) -> None:
    tasks = Calculator.tasks if split is Split.TRAIN else Calculator.eval_tasks
    for index in random.Random(0).sample(range(len(tasks)), 20):
        expression = tasks[index]["expression"]
        value = str(evaluate(expression))
        reward, (result, end) = await play(split, index, turn(expression=expression), turn(f" {value}\n"))
        assert result.messages[0]["content"] == value
        assert (end.done, end.stop_reason) == (True, StopReason.COMPLETED)
        assert reward == 1.0


async def test_others_are_not() -> None:
    value = evaluate(Calculator.tasks[0]["expression"])
    assert (await play(Split.TRAIN, 0))[0] == 0.0
    for answer in ("", str(value + 1), f"It is {value}.", f"{value}.0", f"0{value}"):
        assert (await play(Split.TRAIN, 0, turn(answer)))[0] == 0.0
    # The number alone counts, with or without the tool: the tool is a means.
    assert (await play(Split.TRAIN, 0, turn(str(value))))[0] == 1.0


async def test_what_the_tool_refuses_the_policy_can_read() -> None:
    _, (observation, _) = await play(Split.TRAIN, 0, turn(expression="7 / 2"), turn("3"))
    assert observation.messages[0]["content"] == "error: ValueError: only whole numbers and + - * are known"
    assert not observation.done


def test_the_prompt_is_what_a_policy_needs() -> None:
    environment = load_environment(REF)
    description = environment.describe()
    assert description["system_prompt"] == "Use the calculator. Then answer with the number only."
    assert description["num_tasks"] == {"train": 2000, "eval": 200}
    assert [tool["function"]["name"] for tool in description["tools"]] == ["calculate"]
    assert environment.replayable
    assert environment.reward_range == (0.0, 1.0)
