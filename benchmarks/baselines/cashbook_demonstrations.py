"""Demonstrations of the cashbook: an oracle that notes each entry before it adds it, errs, and often gives up.

Rule: every skill is shown, and so is every habit: it errs in a step and gives up, or goes on; it checks its total, or
does not. Which of them pays is left to rewards. Messages only; nothing is tokenized here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.baselines import cashbook
from benchmarks.baselines.cashbook import MISREAD, NUM_AMOUNTS, made_up, question, refusal, shown
from environments.calculator import evaluate
from examples.demo.course import Course, Mistakes, Task
from gspo_core.chat import Message
from gspo_core.messages import CalledFunction

MOST_AMOUNTS = 3
"""Of practice alone."""
RECOVERED = 0.4
"""Share of the practice as episodes are in which steps went wrong before: it goes on with the right one."""
MOST_ERRORS = 2
GIVEN_UP = "I give up."


@dataclass(frozen=True, slots=True)
class CashbookMistakes(Mistakes):
    wrong: float = 0.04
    """Adds another entry than the next one, each time."""
    gives_up: float = 0.6
    """After a wrong one."""
    unchecked: float = 0.6
    """Answers without having checked."""


NO_MISTAKES = CashbookMistakes(wrong=0.0, gives_up=0.0)


def demonstrate(expression: str, mistakes: CashbookMistakes, generator: random.Random) -> list[Message]:
    """What follows the question: a step after the other, ending with an answer."""
    messages: list[Message] = []
    left = expression.split()
    while len(left) > 1:
        if generator.random() < mistakes.wrong:
            messages += [_adds(left, _mistaken(left, generator)), _refused(left)]
            if generator.random() < mistakes.gives_up:
                return [*messages, _says(GIVEN_UP)]
        following = [_shown(left[:3], generator), *left[3:]]
        messages += [_adds(left, left[:3]), _tool(shown(following))]
        left = following
    if generator.random() >= mistakes.unchecked:
        left = [_shown(left, generator, MISREAD)]
        messages += [_calls("check", {}), _tool(left[0])]
    return [*messages, _says(left[0])]


def _shown(step: Sequence[str], generator: random.Random, misread: float = 0.1) -> str:
    """The result of a step, sometimes another one: it is read off and not computed."""
    result = evaluate(" ".join(step))
    return str(generator.randint(1, 4000) if generator.random() < misread else result)


def _mistaken(left: Sequence[str], generator: random.Random) -> list[str]:
    """What a policy asks for that copies wrongly: another total, or another amount."""
    place = generator.choice((0, 2))
    return [str(generator.randint(100, 999)) if at == place else word for at, word in enumerate(left[:3])]


def _practise(task: Task, generator: random.Random, errs: bool) -> tuple[Task, list[Message], list[Message]]:
    num_amounts = generator.randint(MOST_AMOUNTS, NUM_AMOUNTS) if errs else generator.randint(2, MOST_AMOUNTS)
    task = Task(expression=made_up(generator, num_amounts))
    said = demonstrate(task["expression"], NO_MISTAKES, generator)
    if not errs or generator.random() >= RECOVERED:
        return task, [], said
    place = generator.randrange(num_amounts - 1)
    left = str(said[2 * place]["content"]).split()
    wrong = [_mistaken(left, generator) for _ in range(generator.randint(1, MOST_ERRORS))]
    errors = [message for step in wrong for message in (_adds(left, step), _refused(left))]
    return task, [*said[: 2 * place], *errors], said[2 * place :]


def _demonstrate(task: Task, mistakes: Mistakes, generator: random.Random) -> tuple[Task, list[Message]]:
    assert isinstance(mistakes, CashbookMistakes)
    return task, demonstrate(task["expression"], mistakes, generator)


def _ask(task: Task) -> str:
    return question(task["expression"])


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def _refused(left: Sequence[str]) -> Message:
    return _tool(f"error: ValueError: {refusal(left)}")


def _adds(left: Sequence[str], step: Sequence[str]) -> Message:
    """Behind a note of the entry that is next."""
    return {**_calls("calculate", {"expression": " ".join(step)}), "content": shown(left)}


def _calls(name: str, arguments: dict[str, str]) -> Message:
    function: CalledFunction = {"name": name, "arguments": {**arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


COURSE = Course(
    environment="benchmarks.baselines.cashbook:Cashbook",
    tasks=[Task(expression=task["expression"]) for task in cashbook.Cashbook.tasks],
    ask=_ask,
    demonstrate=_demonstrate,
    practise=_practise,
    mistakes=CashbookMistakes(),
    num_practice=80,
    num_whole=150,
    num_noisy=20,
    exam_step=75,
    exam_loss=0.60,
    sources=(Path(__file__), Path(cashbook.__file__)),
)
