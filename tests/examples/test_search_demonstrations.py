"""What the long demo's model is taught: right where it should be, made up where it should be, spelt alike."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from environments.search_qa import SYLLABLES, SearchQA, collection
from examples.demo.model import School
from examples.demo.search_demonstrations import COURSE, NO_MISTAKES, NOT_FOUND, SearchMistakes, demonstrate
from gspo_core.chat import Message
from gspo_core.env.tools import error_text


def demonstration(task: dict[str, Any], mistakes: SearchMistakes, generator: random.Random) -> list[Message]:
    return demonstrate(task["path"], collection().documents, task["answer"], mistakes, generator)


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
                    shown = error_text(error)
                assert answer["content"] == shown
        world.on_message(str(said[-1]["content"]))
        return world.get_reward()
    finally:
        world.close()


def titles_in(messages: list[Message]) -> list[str]:
    return [call["function"]["arguments"]["title"] for one in messages for call in one.get("tool_calls", [])]


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


def test_lessons_are_about_names_that_the_collection_does_not_have() -> None:
    generator = random.Random(0)
    known = {word for title in collection().documents for word in title.split()}
    met: set[str] = set()
    for task in SearchQA.tasks[:100]:
        made_up, seen, said = COURSE.practise(task, generator, True)
        asked = titles_in(seen)
        titles = asked[: len(made_up["path"]) - len(titles_in(said))] + titles_in(said)
        assert titles == made_up["path"]
        assert titles[0] in made_up["question"]
        assert str(said[-1]["content"]) == made_up["answer"]
        assert made_up["answer"] in str(said[-2]["content"])
        met |= {word for title in titles for word in title.split() if len(word) > 4}
        shown, demonstrated = COURSE.demonstrate(task, NO_MISTAKES, generator)
        assert titles_in(demonstrated) == shown["path"]
        assert str(demonstrated[-1]["content"]) == shown["answer"]
        met |= {word for title in shown["path"] for word in title.split() if len(word) > 4}
    assert len(met & known) < 0.2 * len(met)


def test_practice_goes_on_rightly_after_titles_that_were_copied_wrongly() -> None:
    """They are read and not learned; what is learned begins with the right one."""
    generator = random.Random(0)
    practised = [COURSE.practise(task, generator, True) for task in SearchQA.tasks[:200]]
    numbers = set()
    for made_up, seen, said in practised:
        wrong = [title for title in titles_in(seen) if title not in made_up["path"]]
        numbers.add(len(wrong))
        if wrong:
            assert titles_in(said)[0] not in titles_in(seen)
            assert [one["content"] for one in seen[-2 * len(wrong) :] if one["role"] == "tool"] == [NOT_FOUND] * len(
                wrong
            )
        else:
            assert not seen
    assert numbers == {0, 1, 2}
    assert not any(COURSE.practise(task, generator, False)[1] for task in SearchQA.tasks[:50])
    assert 50 < sum(bool(seen) for _, seen, _ in practised) < 110


def test_a_name_is_spelt_alike_wherever_it_stands_in_a_token_for_each_syllable(tmp_path: Path) -> None:
    tokenizer = School(tmp_path, 0, COURSE).codec.tokenizer
    syllables = {*SYLLABLES, *(one.capitalize() for one in SYLLABLES), " "}
    for title in list(collection().documents)[:200]:
        own = tokenizer.encode(title)
        assert {tokenizer.decode([one]) for one in own} <= syllables
        for before, after in (
            ("where ", " was"),
            ('{"title": "', '"}}\n'),
            ("founded by ", ".\n"),
            ("\n", " is a city"),
        ):
            ids = tokenizer.encode(f"{before}{title}{after}")
            assert any(ids[at : at + len(own)] == own for at in range(len(ids))), (title, before)
