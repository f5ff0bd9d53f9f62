"""Questions whose answer lies two or three documents away, with full-text search over a bundled collection.

The collection describes a made-up world, so that no model knows the answers beforehand; it is made from a seed and kept
in SQLite (FTS5). The tools only read.
"""

from __future__ import annotations

import atexit
import os
import random
import re
import shutil
import sqlite3
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from gspo_core.env import Context

NUM_TRAIN_TASKS, NUM_EVAL_TASKS = 560, 100
_NUM_COUNTRIES, _NUM_CITIES, _NUM_PEOPLE, _NUM_COMPANIES = 20, 60, 150, 120
SYLLABLES = (
    *("ba", "de", "fi", "go", "ka", "lu", "me", "no", "pa", "ri", "sa", "to", "vu", "wen", "zor", "mar", "tel", "quin"),
    *("dro", "bel"),
)
SNIPPET_WORDS = 16
MAX_RESULTS = 8


class Question(TypedDict):
    question: str
    answer: str
    path: list[str]
    """Titles that lead to the answer, in order."""


@dataclass(frozen=True)
class Collection:
    documents: dict[str, str]
    """Title to text."""
    questions: list[Question]


def _names(draw: random.Random, number: int, syllables: int, taken: set[str]) -> list[str]:
    names: list[str] = []
    while len(names) < number:
        name = "".join(draw.choice(SYLLABLES) for _ in range(syllables)).capitalize()
        if name not in taken:
            taken.add(name)
            names.append(name)
    return names


def make_collection(seed: str = "search") -> Collection:
    """The same documents and questions for the same seed."""
    draw, taken = random.Random(seed), set[str]()
    countries = _names(draw, _NUM_COUNTRIES, 3, taken)
    rivers = dict(zip(countries, _names(draw, _NUM_COUNTRIES, 2, taken), strict=True))
    cities = {city: draw.choice(countries) for city in _names(draw, _NUM_CITIES, 3, taken)}
    surnames = _names(draw, _NUM_PEOPLE, 2, taken)
    people = {f"{draw.choice(SYLLABLES).capitalize()} {surname}": draw.choice(list(cities)) for surname in surnames}
    companies = {name: draw.choice(list(people)) for name in _names(draw, _NUM_COMPANIES, 4, taken)}
    goods = {name: draw.choice(("lamps", "boats", "clocks", "violins", "maps", "kites")) for name in companies}
    documents = {
        **{country: f"{country} is a country. Its longest river is the {rivers[country]}." for country in countries},
        **{city: f"{city} is a city in {country}." for city, country in cities.items()},
        **{person: f"{person} was born in {city} and studied engineering." for person, city in people.items()},
        **{
            name: f"{name} is a company that makes {goods[name]}. It was founded by {companies[name]}."
            for name in companies
        },
    }
    questions = []
    for name, founder in companies.items():
        city = people[founder]
        country = cities[city]
        path = [name, founder, city]
        questions += [
            _question(f"In which city was the founder of {name} born?", city, path[:2]),
            _question(f"In which country was the founder of {name} born?", country, path),
            _question(f"Which is the longest river of the country where the founder of {name} was born?",
                      rivers[country], [*path, country]),
        ]  # fmt: skip
    for person, city in people.items():
        country = cities[city]
        questions += [
            _question(f"In which country was {person} born?", country, [person, city]),
            _question(f"Which is the longest river of the country where {person} was born?", rivers[country],
                      [person, city, country]),
        ]  # fmt: skip
    draw.shuffle(questions)
    return Collection(documents, questions[: NUM_TRAIN_TASKS + NUM_EVAL_TASKS])


def _question(text: str, answer: str, path: list[str]) -> Question:
    return {"question": text, "answer": answer, "path": path}


_COLLECTION = make_collection()


def collection() -> Collection:
    return _COLLECTION


class SearchQA:
    """Find the answer in the collection: search it, read what you find, and end with the answer only, a name."""

    tasks = _COLLECTION.questions[:NUM_TRAIN_TASKS]
    eval_tasks = _COLLECTION.questions[NUM_TRAIN_TASKS:]
    limits = {"max_turns": 12, "max_tool_calls": 16}  # noqa: RUF012 - never changed
    reward_range = (0.0, 1.0)
    replayable = True

    def reset(self, question: str, answer: str, path: list[str], ctx: Context | None = None) -> str:
        self._answer, self._said, self._ctx = answer, "", ctx
        self._needed = set(path)
        self._read: set[str] = set()
        self._index = sqlite3.connect(f"file:{_index_file()}?mode=ro", uri=True)
        return question

    def search(self, query: str, limit: int = 5) -> list[dict[str, str]]:
        """Search titles and texts.

        Args:
            query: a few words
            limit: how many results, at most 8
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise ValueError("the query has no words")
        matching = " OR ".join(f'"{word}"' for word in words)
        rows = self._index.execute(
            "SELECT title, snippet(documents, 1, '', '', '...', ?) FROM documents WHERE documents MATCH ? "
            "ORDER BY bm25(documents), title LIMIT ?",
            (SNIPPET_WORDS, matching, max(1, min(limit, MAX_RESULTS))),
        )
        return [{"title": title, "text": text} for title, text in rows]

    def read(self, title: str) -> str:
        """Read a document.

        Args:
            title: its exact title
        """
        row = self._index.execute("SELECT text FROM documents WHERE title = ?", (title,)).fetchone()
        if row is None:
            raise ValueError("there is no document with this title; search for one")
        self._read.add(title)
        return str(row[0])

    def on_message(self, text: str) -> None:
        """Words instead of a call are the answer, and end the episode."""
        self._said = text

    def get_reward(self) -> float:
        if self._ctx is not None:
            self._ctx.metric("documents_found", len(self._needed & self._read) / len(self._needed))
        return float(_normal(self._said) == _normal(self._answer))

    def close(self) -> None:
        self._index.close()

    @staticmethod
    def oracle(question: str, answer: str, path: list[str]) -> list[str | tuple[str, dict[str, str]]]:
        """A perfect policy's turns."""
        reads: list[str | tuple[str, dict[str, str]]] = [("read", {"title": title}) for title in path]
        return [("search", {"query": question}), *reads, answer]


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


_index_lock = threading.Lock()
_index_files: dict[int, Path] = {}


def _index_file() -> Path:
    """The index, built once in each process: a forked one has a directory of its own."""
    with _index_lock:
        if os.getpid() not in _index_files:
            directory = Path(tempfile.mkdtemp(prefix="gspo-search-"))
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
            path = directory / "documents.sqlite"
            with sqlite3.connect(path) as index:
                index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
                index.executemany("INSERT INTO documents VALUES (?, ?)", sorted(_COLLECTION.documents.items()))
            index.close()
            _index_files[os.getpid()] = path
        return _index_files[os.getpid()]
