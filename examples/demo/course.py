"""What a demo model is taught before its demo: lessons of one environment, and how many of which.

Rule: a course knows training tasks only. It makes messages and tokenizes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from gspo_core.chat import Message
from gspo_core.starter import tokenizer


class Task(TypedDict, total=False):
    expression: str
    """Of the calculator; the others are of the search."""
    question: str
    answer: str
    path: list[str]


class Mistakes:
    """How often a demonstration errs, each kind of mistake with a probability of its own."""


@dataclass(frozen=True)
class Course:
    environment: str
    tasks: Sequence[Task]
    ask: Callable[[Task], str]
    """The question of a task, as the environment puts it."""
    demonstrate: Callable[[Task, Mistakes, random.Random], tuple[Task, list[Message]]]
    """A task, which may be a made-up one, and what follows its question, with mistakes as often as the second argument
    says."""
    practise: Callable[[Task, random.Random, bool], tuple[Task, list[Message], list[Message]]]
    """A skill alone: a task, which may be a made-up one, what has gone wrong since its question, which is read and not
    learned, and what follows. The last argument says whether something may have gone wrong."""
    mistakes: Mistakes
    num_practice: int
    """Steps of the skill alone: with no mistakes and no system prompt in the way, copying is learned several times as
    fast."""
    num_whole: int
    """Then steps of the same behind the system prompt, as episodes are."""
    num_noisy: int
    """Then steps of the habits."""
    exam_step: int
    """Step after which a start whose loss is above ``exam_loss`` is given up; within the practice."""
    exam_loss: float
    sources: tuple[Path, ...]
    """Files that decide about its lessons."""
    words: str = tokenizer.WORDS
    """Pattern of what the tokenizer may take as one, beside digits."""
    max_vocab_size: int = tokenizer.MAX_VOCAB_SIZE
    spelled_from_practice: bool = False
    """Whether the tokenizer sees practice instead of demonstrations, so that the world's own names are no tokens."""

    @property
    def num_steps(self) -> int:
        return self.num_practice + self.num_whole + self.num_noisy
