"""What a job may say of a judge, what the judge is asked, and which number is read from what it says."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gspo_core.judge_spec import JudgeSpec, NoScore
from gspo_core.placeholders import NoSuchField
from gspo_core.spec import AgentSpec

GIVEN = {"url": "https://judge.example/v1", "model": "m", "prompt": "How good is {{answer}}?"}


def judge(**changes: Any) -> JudgeSpec:
    return JudgeSpec.model_validate(GIVEN | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "How good is it?"}, "sees nothing of the episode"),
        ({"prompt": "{{answers}}"}, r"there is no \{\{answers\}\}"),
        ({"prompt": "{{answer}} {{task.}}"}, r"there is no \{\{task\.\}\}"),
        ({"range": (1.0, 1.0)}, "must be below"),
        ({"range": (0.0, float("inf"))}, "finite"),
        ({"field": "a", "after": "b"}, "one of field and after"),
        ({"request": {"n": 2}}, "request.n is not yours"),
        ({"request": {"messages": []}}, "request.messages is not yours"),
        ({"request": {"temperature": float("nan")}}, "finite"),
        ({"key": "sk-SECRET"}, "pattern"),
        ({"url": "ftp://judge.example"}, "pattern"),
        ({"api_key": "sk-1"}, "Extra inputs"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        judge(**changes)


def test_a_judge_stands_alone() -> None:
    with pytest.raises(ValidationError, match="one of reward and judge"):
        AgentSpec.model_validate({"judge": GIVEN, "reward": "a.py:b"})


def test_the_prompt_is_filled_in_once() -> None:
    """What the policy says is read for no placeholders."""
    spec = judge(prompt='{{task.deep.name}}|{{ task.tags }}|{{conversation}}|{{answer}}|{"score": {{task.n}}}')
    task = {"deep": {"name": "{{answer}}"}, "tags": ["ä"], "n": 3}
    assert spec.ask(lambda: "{{task}}", "{{task.n}}", task) == '{{answer}}|["ä"]|{{task}}|{{task.n}}|{"score": 3}'
    assert spec.asks_for_task
    assert not judge().asks_for_task
    with pytest.raises(NoSuchField, match=r"no field deep\.name"):
        spec.ask(str, "", {"deep": "flat"})


def test_many_blanks_in_a_prompt_take_no_time() -> None:
    """Whoever submits a job writes it, and the API reads it; in time with the cube of it this took hours."""
    blanks = " " * 30_000
    assert judge(prompt="{{" + blanks + "{{answer}}").ask(str, "that", {}) == "{{" + blanks + "that"
    assert judge(prompt="{{" + blanks + "answer" + blanks + "}}").ask(str, "that", {}) == "that"


def test_a_conversation_is_read_only_where_it_is_asked_for() -> None:
    assert judge().ask(lambda: pytest.fail("not asked for"), "that", {}) == "How good is that?"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 0.5}', 0.5),
        ('Well: ```json\n{"why": "{", "score": 1}\n```', 1.0),
        ('{"score": 0} on second thoughts {"score": 0.75, "parts": {"score": 0.1}} {"more": 1}', 0.75),
        ('{ no {"score": 1e-1}', 0.1),
    ],
)
def test_a_score_is_in_the_last_object_that_has_one(text: str, score: float) -> None:
    assert judge().score(text) == score
    assert judge(field="mark").score(text.replace("score", "mark")) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("SCORE: 3", 3),
        ("SCORE: 1\nno, SCORE:  **4.5**/5", 4.5),
        ("SCORE: .5.", 0.5),
        ("SCORE=+2e0", 2),
        ("SCORE: 1.", 1),
    ],
)
def test_a_score_stands_behind_the_last_mark(text: str, score: float) -> None:
    assert judge(after="SCORE", range=(0, 5)).score(text) == score


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("", {}),
        ("0.5", {}),
        ('{"score": "0.5"}', {}),
        ('{"score": true}', {}),
        ('{"score": null}', {}),
        ('{"score": NaN}', {}),
        ('{"score": 1.01}', {}),
        ('{"score": -0.01}', {}),
        ('{"score": 1e999}', {}),
        ("{" * 60_000 + '{"score": 1}', {}),
        ('{"score": 1}' + " " * 70_000, {}),
        ("[" * 60_000, {"field": "score"}),
        ("SCORE: none", {"after": "SCORE:"}),
        ("SCORE: 1\nSCORE: unknown", {"after": "SCORE:"}),
        ("SCORE: 7", {"after": "SCORE:"}),
        ("SCORE: 1.0.0", {"after": "SCORE:"}),
        ("score: 1", {"after": "SCORE:"}),
    ],
)
def test_what_is_no_score_is_none(text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(NoScore):
        judge(**changes).score(text)
