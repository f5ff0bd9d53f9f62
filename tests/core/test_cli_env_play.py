"""A line typed at ``gspo env play``, as a turn."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo_core.cli.env import play, read_turn
from gspo_core.messages import ToolSchema

ADD: ToolSchema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


@pytest.mark.parametrize("name", ["add", "other"])
@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        ('amount=3 text="two words"', {"amount": 3, "text": "two words"}),
        (r'text="she said \"a = b\" twice" last=true', {"text": 'she said "a = b" twice', "last": True}),
        ('text="x\\\\" amount=3', {"text": "x\\", "amount": 3}),
        ('tags=["a b","c"] at={"x":null}', {"tags": ["a b", "c"], "at": {"x": None}}),
        ("text=plain other=don't", {"text": "plain", "other": "don't"}),
        ('text="torn', {"text": '"torn'}),
    ],
)
def test_quoted_texts_stay_together_and_values_are_json_where_they_can_be(
    name: str, typed: str, arguments: dict[str, Any]
) -> None:
    turn = read_turn(f"{name} {typed}", [ADD])
    (call,) = turn.calls
    assert (call.name, call.arguments) == (name, arguments)


@pytest.mark.parametrize("line", ["what is 3", "other 3", 'say "a=b c=d"', "x = 3", "other"])
def test_other_words_are_a_turn_without_a_call(line: str) -> None:
    turn = read_turn(line, [ADD])
    assert (turn.text, turn.calls) == (line, ())


def test_a_line_of_json_is_a_call() -> None:
    (call,) = read_turn(json.dumps({"name": "add", "arguments": {"amount": 3}}), [ADD]).calls
    assert (call.name, call.arguments) == ("add", {"amount": 3})


HANGING = '''
import asyncio


class Hanging:
    limits = {"step_timeout_s": 0.05}

    def reset(self):
        return "go"

    async def hang(self) -> None:
        """Hang."""
        await asyncio.Event().wait()

    def get_reward(self):
        return 1.0
'''


def test_a_tool_has_the_time_that_its_author_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hang\n:end\n"))
    ref = f"{tmp_path}/hanging.py:Hanging"
    assert play(argparse.Namespace(ref=ref, config=None, split="train", task=0, seed=0)) == 0
    assert "error: hang timed out after 0.05s" in capsys.readouterr().out
