"""The first messages of an episode."""

from dataclasses import dataclass
from typing import Any

import pytest

from gspo_core.env.prompt import docstring_prompt, first_messages

USER = "user"
PART = {"type": "text", "text": "look"}


@pytest.mark.parametrize(
    ("prompt", "observation", "content"),
    [
        (None, "Reach 3.", "Reach 3."),
        (None, None, ""),
        ("Play. ", "Reach 3.", "Play. Reach 3."),
        ("Play.", None, "Play."),
        (None, [PART], [PART]),
        ("Play.", [PART], [{"type": "text", "text": "Play."}, PART]),
        ([{"role": USER, "content": [PART]}], "now", [PART, {"type": "text", "text": "now"}]),
        ([{"role": USER, "content": None}], "now", "now"),
    ],
)
def test_what_reset_returns_joins_the_last_message(prompt: Any, observation: Any, content: Any) -> None:
    task = {} if prompt is None else {"prompt": prompt}
    assert first_messages(task, observation, None) == [{"role": USER, "content": content}]


def test_a_docstring_becomes_the_system_message_unless_there_is_one() -> None:
    assert first_messages({}, "go", "Be brief.")[0] == {"role": "system", "content": "Be brief."}
    given = {"prompt": [{"role": "system", "content": "Be long."}, {"role": USER, "content": "a"}]}
    assert first_messages(given, "b", "Be brief.") == [
        {"role": "system", "content": "Be long."},
        {"role": USER, "content": "ab"},
    ]


def test_the_task_is_never_changed() -> None:
    message: dict[str, Any] = {"role": USER, "content": [PART]}
    task = {"prompt": [message]}
    first_messages(task, "now", "system")
    first_messages(task, "now", "system")
    assert task == {"prompt": [{"role": USER, "content": [PART]}]}
    assert task["prompt"][0] is message


@pytest.mark.parametrize(("prompt", "observation"), [(7, None), ([], None), (["a"], None), ("a", 7), (None, ["a"])])
def test_other_forms_are_refused(prompt: Any, observation: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        first_messages({} if prompt is None else {"prompt": prompt}, observation, None)


def test_generated_docstrings_are_no_prompt() -> None:
    @dataclass
    class Generated:
        value: int

    class Written:
        """Be brief.

        Always.
        """

    class Silent: ...

    assert docstring_prompt(Generated) is None
    assert docstring_prompt(Silent) is None
    assert docstring_prompt(Written) == "Be brief.\n\nAlways."
