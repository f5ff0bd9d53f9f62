"""The same held-out task under two weights, as `make demo` shows it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.demo import demo_spec
from examples.demo.model import School
from examples.demo.side_by_side import NARROWEST_PAIR, Played, PlayedLine, drawn, play_both
from gspo_core.starter.untrained import write_untrained

WRONG = Played("What is 1 + 2?", [PlayedLine("model", "It is 4.")], 0.0)
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 2"}}\n</tool_call>'
RIGHT = Played("What is 1 + 2?", [PlayedLine("model", CALL), PlayedLine("tool", "3"), PlayedLine("model", "3")], 1.0)


def lines(width: int, first: Played = WRONG, second: Played = RIGHT) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(drawn(first, second, ("before", "after"), width))
    return out.getvalue().splitlines()


def test_both_stand_beside_each_other_within_a_hundred_columns() -> None:
    found = lines(100)
    assert max(map(len, found)) <= 100
    assert any("before" in line and "after" in line for line in found)
    assert any("It is 4." in line and "<tool_call>" in line for line in found)
    assert any("reward 0" in line and "reward 1" in line for line in found)
    assert any("tool: 3" in line for line in found)


def test_on_a_narrow_terminal_one_stands_below_the_other() -> None:
    found = lines(NARROWEST_PAIR - 1)
    assert max(map(len, found)) < NARROWEST_PAIR
    place = {text: next(i for i, line in enumerate(found) if text in line) for text in ("It is 4.", "after", "tool: 3")}
    assert place["It is 4."] < place["after"] < place["tool: 3"]


def test_what_a_policy_writes_is_text_and_nothing_else() -> None:
    text = "\n".join(lines(100, Played("q", [PlayedLine("model", "[red]\x1b[2J[/red]")])))
    assert "\x1b" not in text
    assert "[red]" in text


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two random ones: what they say means nothing, and differs."""
    found = []
    for seed in (0, 1):
        directory = tmp_path_factory.mktemp("model")
        write_untrained(directory, School(directory, 0).codec, seed)
        found.append(directory)
    return found[0], found[1]


def test_the_same_task_is_played_under_each_and_repeats(two_models: tuple[Path, Path]) -> None:
    first, second = play_both(demo_spec(two_models[0], 0), *two_models)
    assert first.question.startswith("What is ")
    assert first.question == second.question
    assert first.lines != second.lines
    assert first.reward == 0.0
    assert play_both(demo_spec(two_models[0], 0), *two_models) == (first, second)
