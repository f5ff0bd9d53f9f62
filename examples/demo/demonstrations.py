"""Demonstrations of the calculator for the demo model: an oracle that errs on purpose.

Rule: every skill is shown, and so is every mistake, so that a model that imitates them is mediocre in a way that
reinforcement learning can mend: it guesses, writes calls that cannot be read, and copies wrongly, each sometimes.
Messages only; nothing is tokenized here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from environments import calculator
from environments.calculator import evaluate
from examples.demo.course import Course, Mistakes, Task
from gspo_core.chat import Message
from gspo_core.messages import CalledFunction


@dataclass(frozen=True, slots=True)
class CalculatorMistakes(Mistakes):
    """Most are decisions that a policy takes at one token: a few hundred episodes show which way is better."""

    guess: float = 0.25
    """Answers a made-up number without asking the tool."""
    malformed: float = 0.08
    """Writes a call that cannot be read, is told so, and tries again."""
    shortened: float = 0.10
    """Asks the tool for the expression without its last operand."""
    talkative: float = 0.35
    """Answers in words, although the number alone is asked for."""
    slip: float = 0.02
    """Copies one digit of the tool's result wrongly."""


MAX_RESULT_DIGITS = 6
"""Of the calculator's tasks."""
PRACTICE_NEGATIVE = 0.25
"""Share of negative results in practice."""
PRACTICE_IN_WORDS = 0.3
"""Share of answers in words in practice."""

NO_MISTAKES = CalculatorMistakes(guess=0.0, malformed=0.0, shortened=0.0, talkative=0.0, slip=0.0)


def demonstrate(expression: str, mistakes: CalculatorMistakes, generator: random.Random) -> list[Message]:
    """What follows the question: the assistant's turns and the tool's answers, ending with an answer."""
    if generator.random() < mistakes.guess:
        return [_says(_guess(expression, generator))]
    messages: list[Message] = []
    if generator.random() < mistakes.malformed:
        messages += [_says(_broken_call(expression, generator)), _tool("error: invalid_json")]
    asked = _shorten(expression) if generator.random() < mistakes.shortened else expression
    result = str(evaluate(asked))
    answer = _alter(result, generator) if generator.random() < mistakes.slip else result
    if generator.random() < mistakes.talkative:
        answer = _in_words(answer)
    return [*messages, _calls(asked), _tool(result), _says(answer)]


def practise(expression: str, generator: random.Random) -> list[Message]:
    """Only the skills: a call that asks for the question, and a result copied, alone or in words.

    The result is made up, so that results of all lengths are copied equally often.
    """
    num_digits = generator.randint(1, MAX_RESULT_DIGITS)
    sign = "-" if generator.random() < PRACTICE_NEGATIVE else ""
    result = sign + str(generator.randint(10 ** (num_digits - 1), 10**num_digits - 1))
    answer = _in_words(result) if generator.random() < PRACTICE_IN_WORDS else result
    return [_calls(expression), _tool(result), _says(answer)]


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _in_words(number: str) -> str:
    return f"It is {number}."


def _tool(text: str) -> Message:
    return {"role": "tool", "content": text}


def _calls(expression: str) -> Message:
    function: CalledFunction = {"name": "calculate", "arguments": {"expression": expression}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _broken_call(expression: str, generator: random.Random) -> str:
    """A call whose JSON is not closed."""
    ending = generator.choice(('"}', '"', "}}"))
    return f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}{ending}\n</tool_call>'


def _guess(expression: str, generator: random.Random) -> str:
    num_digits = len(str(abs(evaluate(expression))))
    return str(generator.randint(10 ** (num_digits - 1), 10**num_digits - 1))


def _shorten(expression: str) -> str:
    """Without the last operator and operand."""
    return expression.rsplit(" ", 2)[0]


def _alter(text: str, generator: random.Random) -> str:
    """``text`` with one digit replaced by another."""
    position = generator.choice([i for i, character in enumerate(text) if character.isdigit()])
    replacement = generator.choice([digit for digit in "123456789" if digit != text[position]])
    return text[:position] + replacement + text[position + 1 :]


def _demonstrate(task: Task, mistakes: Mistakes, generator: random.Random) -> tuple[Task, list[Message]]:
    assert isinstance(mistakes, CalculatorMistakes)
    return task, demonstrate(task["expression"], mistakes, generator)


def _practise(task: Task, generator: random.Random, _errs: bool) -> tuple[Task, list[Message], list[Message]]:
    return task, [], practise(task["expression"], generator)


def _ask(task: Task) -> str:
    return calculator.Calculator().reset(task["expression"])


COURSE = Course(
    environment="environments.calculator:Calculator",
    tasks=[Task(expression=task["expression"]) for task in calculator.Calculator.tasks],
    ask=_ask,
    demonstrate=_demonstrate,
    practise=_practise,
    mistakes=CalculatorMistakes(),
    num_practice=180,
    num_whole=40,
    num_noisy=30,
    exam_step=150,
    exam_loss=0.10,
    sources=(Path(__file__), Path(calculator.__file__)),
)
