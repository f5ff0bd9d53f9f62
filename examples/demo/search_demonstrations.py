"""Demonstrations of `search_qa` for the long demo's model: an oracle that reads from document to document, and errs.

Rule: all lessons follow links through made-up documents about made-up names, so that a model learns to copy what it
reads and not to remember the collection. Demonstrations show every mistake: it answers too early, misspells a title,
guesses, answers in words. Messages only; nothing is tokenized here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments import search_qa
from examples.demo.course import Course, Mistakes, Task
from gspo_core.chat import Message
from gspo_core.messages import CalledFunction

_SYLLABLES = "|".join(search_qa.SYLLABLES)
_BEGINNINGS = "|".join(syllable.capitalize() for syllable in search_qa.SYLLABLES)
_SYLLABLE = re.compile(f"{_BEGINNINGS}|{_SYLLABLES}")
GOODS = ("lamps", "boats", "clocks", "violins", "maps", "kites")
RECOVERED = 0.4
"""Share of the practice in which some titles were copied wrongly before: it goes on with the right one."""
MOST_ERRORS = 2
NOT_FOUND = "error: ValueError: there is no document with this title; search for one"


@dataclass(frozen=True, slots=True)
class SearchMistakes(Mistakes):
    guess: float = 0.15
    """Answers a made-up name without reading anything."""
    hasty: float = 0.35
    """Answers with what an earlier document names."""
    misspelt: float = 0.04
    """Asks for a title that does not exist, is told so, and tries again."""
    talkative: float = 0.25
    """Answers in words, although the name alone is asked for."""


NO_MISTAKES = SearchMistakes(guess=0.0, hasty=0.0, misspelt=0.0, talkative=0.0)


def demonstrate(
    path: Sequence[str], documents: Mapping[str, str], answer: str, mistakes: SearchMistakes, generator: random.Random
) -> list[Message]:
    """What follows the question: a document after the other, ending with an answer."""
    if generator.random() < mistakes.guess:
        return [_says(_name(generator, 2))]
    num_read = len(path)
    if generator.random() < mistakes.hasty:
        num_read = generator.randint(1, len(path) - 1)
        answer = path[num_read]
    messages: list[Message] = []
    for title in path[:num_read]:
        if generator.random() < mistakes.misspelt / len(path):
            messages += [_reads(_misspell(title, generator)), _tool(NOT_FOUND)]
        messages += [_reads(title), _tool(documents[title])]
    return [*messages, _says(f"It is {answer}." if generator.random() < mistakes.talkative else answer)]


def _made_up(task: Task, generator: random.Random) -> tuple[Task, dict[str, str]]:
    """The question of ``task`` about names that do not exist, and the documents behind it."""
    company, city, country = _name(generator, 4), _name(generator, 3), _name(generator, 3)
    person, river = f"{_name(generator, 1)} {_name(generator, 2)}", _name(generator, 2)
    documents = {
        company: f"{company} is a company that makes {generator.choice(GOODS)}. It was founded by {person}.",
        person: f"{person} was born in {city} and studied engineering.",
        city: f"{city} is a city in {country}.",
        country: f"{country} is a country. Its longest river is the {river}.",
    }
    chain = [company, person, city, country, river]
    first = 0 if "founder" in task["question"] else 1
    path = chain[first : first + len(task["path"])]
    question = task["question"].replace(task["path"][0], path[0])
    return {"question": question, "answer": chain[first + len(path)], "path": path}, documents


def _practise(task: Task, generator: random.Random, errs: bool) -> tuple[Task, list[Message], list[Message]]:
    made_up, documents = _made_up(task, generator)
    said = demonstrate(made_up["path"], documents, made_up["answer"], NO_MISTAKES, generator)
    if not errs or generator.random() >= RECOVERED:
        return made_up, [], said
    place = generator.randrange(len(made_up["path"]))
    wrong = [_mistaken(made_up["path"][place], generator) for _ in range(generator.randint(1, MOST_ERRORS))]
    errors = [message for title in wrong for message in (_reads(title), _tool(NOT_FOUND))]
    return made_up, [*said[: 2 * place], *errors], said[2 * place :]


def _demonstrate(task: Task, mistakes: Mistakes, generator: random.Random) -> tuple[Task, list[Message]]:
    assert isinstance(mistakes, SearchMistakes)
    made_up, documents = _made_up(task, generator)
    return made_up, demonstrate(made_up["path"], documents, made_up["answer"], mistakes, generator)


def _ask(task: Task) -> str:
    return str(task["question"])


def _name(generator: random.Random, num_syllables: int) -> str:
    return "".join(generator.choice(search_qa.SYLLABLES) for _ in range(num_syllables)).capitalize()


def _mistaken(title: str, generator: random.Random) -> str:
    """What a policy asks for that copies wrongly: a letter less, or another syllable."""
    if generator.random() < 0.25:
        return _misspell(title, generator)
    place = generator.choice(list(_SYLLABLE.finditer(title)))
    others = [syllable for syllable in search_qa.SYLLABLES if syllable != place[0].lower()]
    other = generator.choice(others)
    return title[: place.start()] + (other.capitalize() if place[0].istitle() else other) + title[place.end() :]


def _misspell(title: str, generator: random.Random) -> str:
    """Without one letter inside."""
    position = generator.randrange(1, len(title) - 1)
    return title[:position] + title[position + 1 :]


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def _reads(title: str) -> Message:
    function: CalledFunction = {"name": "read", "arguments": {"title": title}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


COURSE = Course(
    environment="environments.search_qa:SearchQA",
    tasks=[
        Task(question=task["question"], answer=task["answer"], path=task["path"]) for task in search_qa.SearchQA.tasks
    ],
    ask=_ask,
    demonstrate=_demonstrate,
    practise=_practise,
    mistakes=SearchMistakes(),
    num_practice=160,
    num_whole=200,
    num_noisy=40,
    exam_step=150,
    exam_loss=0.30,
    sources=(Path(__file__), Path(search_qa.__file__)),
    # A name is spelt alike wherever it stands, a token for each syllable: so few are copied rightly soon.
    words=rf"{_BEGINNINGS}|(?<=[a-z])(?:{_SYLLABLES})|[A-Z][a-z]*|[^\dA-Z\n]*\n+|[^\dA-Z\n]+",
    max_vocab_size=900,
    spelled_from_practice=True,
)
