"""What the long demo's model is taught: right where it should be, made up where it should be, spelt alike."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from environments.search_qa import SearchQA, collection
from examples.demo.model import School
from examples.demo.search_demonstrations import COURSE, NO_MISTAKES, SearchMistakes
from gspo_core.chat import Message


def demonstration(task: dict[str, Any], mistakes: SearchMistakes, generator: random.Random) -> list[Message]:
    return COURSE.demonstrate(task, mistakes, generator)


def reward(task: dict[str, Any], said: list[Message]) -> float:
    """What the real environment gives for it; what its tools say must be what the demonstration says that they say."""
    world = SearchQA()
    world.reset(**task)
    try:
        for message, answer in zip(said, [*said[1:], None], strict=True):
            for call in message.get("tool_calls", []):
                assert answer is not None
                try:
                    shown = world.read(**call["function"]["arguments"])
                except ValueError as error:
                    shown = f"error: {error}"
                assert answer["content"] == shown
        world.on_message(str(said[-1]["content"]))
        return world.get_reward()
    finally:
        world.close()


def test_a_faultless_demonstration_is_right_in_two_to_four_calls() -> None:
    generator = random.Random(0)
    numbers = set()
    for task in SearchQA.tasks[:100]:
        said = demonstration(task, NO_MISTAKES, generator)
        assert reward(task, said) == 1.0
        numbers.add(sum("tool_calls" in message for message in said))
    assert numbers == {2, 3, 4}


@pytest.mark.parametrize("mistake", ["guess", "hasty", "misspelt", "talkative"])
def test_every_mistake_is_shown(mistake: str) -> None:
    generator = random.Random(0)
    mistakes = dataclasses.replace(NO_MISTAKES, **{mistake: 1.0})
    demonstrations = [(task, demonstration(task, mistakes, generator)) for task in SearchQA.tasks[:60]]
    # A title that is misspelt costs a call and not the answer.
    expected = 1.0 if mistake == "misspelt" else 0.0
    assert [reward(task, said) for task, said in demonstrations] == [expected] * 60
    errors = sum(str(message["content"]).startswith("error") for _, said in demonstrations for message in said)
    assert (errors > 30) == (mistake == "misspelt")


def test_practice_is_about_names_that_the_collection_does_not_have() -> None:
    generator = random.Random(0)
    known = {word for title in collection().documents for word in title.split()}
    met: set[str] = set()
    for task in SearchQA.tasks[:100]:
        made_up, said = COURSE.practise(task, generator)
        titles = [call["function"]["arguments"]["title"] for one in said for call in one.get("tool_calls", [])]
        assert titles == made_up["path"]
        assert titles[0] in made_up["question"]
        assert str(said[-1]["content"]) == made_up["answer"]
        assert made_up["answer"] in str(said[-2]["content"])
        met |= {word for title in titles for word in title.split() if len(word) > 4}
    assert len(met & known) < 0.2 * len(met)


def test_a_name_is_spelt_alike_wherever_it_stands(tmp_path: Path) -> None:
    tokenizer = School(tmp_path, 0, COURSE).codec.tokenizer
    for title in list(collection().documents)[:200]:
        own = tokenizer.encode(title)
        for before, after in (
            ("where ", " was"),
            ('{"title": "', '"}}\n'),
            ("founded by ", ".\n"),
            ("\n", " is a city"),
        ):
            ids = tokenizer.encode(f"{before}{title}{after}")
            assert any(ids[at : at + len(own)] == own for at in range(len(ids))), (title, before)
