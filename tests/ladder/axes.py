"""The sizes that a user's job may have, which of them go together, and the rows of a run.

Rule: a row is left out only where it cannot be: a prompt shorter than what the world itself says, fewer tools than it
has, an observation that nobody reads. Everything here is data; nothing is started.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

from tests.ladder.covering import Covering, Values, cover

SHORT = 0
PLAIN = "plain"
SHORTEST = 1
"""Asked for as one token: the shortest prompt that Qwen's template can write, with one token of the user in it."""
EXACT = (SHORTEST, 255, 256, 257, 4_000, 30_000)
"""Prompts that are to have exactly so many tokens: around the probe of 256 of the parity gate, and far beyond."""
PROMPTS = (20, 250, 260, 2_000, 8_000, 30_000)
OBSERVATIONS = (SHORT, 20_000)
TURNS = (1, 3, 30)
TOOLS = (0, 1, 5, 20)
JOBS = (1, 2)
CHATS = ("auto", "template")
TRAINED = ("full", "lora")
SPOKEN = 70
"""Tokens that a turn and its answer take at most, roughly."""


@dataclass(frozen=True)
class Row:
    prompt: int
    """Tokens."""
    observation: int
    """Tokens of the first answer; 0 is whatever the world says."""
    turns: int
    tools: int
    world: str
    jobs: int
    """At once, on the same stack."""
    chat: str
    """Of ``chat.format``."""
    train: str
    """All weights, or low-rank additions."""
    exact: bool = False
    """The prompt has to have exactly so many tokens."""

    @property
    def name(self) -> str:
        prompt = f"={self.prompt}" if self.exact else str(self.prompt)
        size = f"p{prompt} o{self.observation} t{self.turns} f{self.tools}"
        return f"{size} {self.world} j{self.jobs} {self.chat} {self.train}"

    @property
    def num_tokens(self) -> int:
        """Of an episode, roughly."""
        return self.prompt + self.observation + self.turns * SPOKEN


AXES = [one.name for one in fields(Row) if one.name != "exact"]


class Nature(NamedTuple):
    """What a world is without anything added."""

    tools: int
    prompt: Mapping[int, int]
    """Number of tools -> tokens of its own prompt with so many."""


def exact_rows() -> list[Row]:
    return [Row(prompt, SHORT, 1, 0, PLAIN, 2, "auto", "full", exact=True) for prompt in EXACT]


def all_maxima(worlds: Mapping[str, Nature]) -> Row:
    """In the world that has most by itself."""
    world = max(worlds, key=lambda name: (worlds[name].tools, worlds[name].prompt[max(TOOLS)]))
    return Row(max(PROMPTS), max(OBSERVATIONS), max(TURNS), max(TOOLS), world, max(JOBS), "template", "full")


def rows_of(worlds: Mapping[str, Nature], seed: int) -> tuple[list[Row], Covering]:
    """All rows of a run, and what the pairwise part of them could not hold."""
    given = [*exact_rows(), all_maxima(worlds)]
    axes: dict[str, Sequence[Hashable]] = {
        "prompt": PROMPTS,
        "observation": OBSERVATIONS,
        "turns": TURNS,
        "tools": TOOLS,
        "world": tuple(worlds),
        "jobs": JOBS,
        "chat": CHATS,
        "train": TRAINED,
    }
    assert list(axes) == AXES
    covering = cover(
        axes,
        possible=lambda values: is_possible(_row(values), worlds),
        cost=lambda values: cost(_row(values)),
        generator=random.Random(seed),
        given=[astuple(row)[: len(AXES)] for row in given],
    )
    return [*given, *map(_row, covering.rows)], covering


def is_possible(row: Row, worlds: Mapping[str, Nature]) -> bool:
    world = worlds[row.world]
    if row.tools < world.tools or row.prompt < world.prompt[row.tools]:
        return False
    return row.turns > 1 or row.observation == SHORT


def cost(row: Row) -> float:
    """Seconds, roughly: attention is quadratic, and two jobs at once share what a start takes."""
    start = 8.0 if row.jobs == 1 else 4.0
    return start + 0.3 * row.turns + (row.num_tokens / 1_000) + (row.num_tokens / 6_000) ** 2


def _row(values: Values) -> Row:
    given: Any = values
    return Row(*given)
