"""A book of amounts, added up entry by entry: the varied calculator of runs with long episodes.

Rule: all that an episode cannot know is drawn from its own id, so members of a group have luck of their own. A right
total that nobody checked is worth most, and some are wrong through no fault of the policy: handing it in is a gamble
that checking beats in the mean, so what pays has to be learned from what was lost. The members are async, as
in ``world``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from environments.calculator import evaluate

if TYPE_CHECKING:
    from gspo_core.env import Context

NUM_TRAIN_TASKS, NUM_EVAL_TASKS = 2000, 100
NUM_AMOUNTS = 9
MISREAD = 0.4
"""Share of the episodes in which the calculator shows one result that is wrong."""
UNCHECKED, CHECKED, NOTHING = 1.0, 0.9, 0.5
"""What a right total is worth, and a book that is not brought to its end; a wrong total is worth 0."""


def _make_tasks() -> list[dict[str, str]]:
    """Distinct books that are never overdrawn, the same in every process."""
    generator = random.Random("cashbook")
    expressions: dict[str, None] = {}
    while len(expressions) < NUM_TRAIN_TASKS + NUM_EVAL_TASKS:
        expressions[made_up(generator, NUM_AMOUNTS)] = None
    return [{"expression": expression} for expression in expressions]


def made_up(generator: random.Random, num_amounts: int) -> str:
    total = generator.randint(100, 999)
    expression = str(total)
    for _ in range(num_amounts - 1):
        amount = generator.randint(100, 999)
        sign = generator.choice("+-") if amount <= total else "+"
        total += amount if sign == "+" else -amount
        expression += f" {sign} {amount}"
    return expression


def question(expression: str) -> str:
    """What is asked: the others come one by one."""
    return f"Begin with {shown(expression.split())}."


def shown(left: Sequence[str]) -> str:
    """The total so far and the entry that comes next, of all that are left."""
    return " ".join(left[:3])


def refusal(left: Sequence[str]) -> str:
    """What is answered to another entry: who reads it can go on."""
    return f"the next entry is {shown(left)}"


_TASKS = _make_tasks()


class Cashbook:
    """Add up all entries. Then answer with the number only."""

    tasks = _TASKS[:NUM_TRAIN_TASKS]
    eval_tasks = _TASKS[NUM_TRAIN_TASKS:]
    limits = {"max_turns": 13, "max_tool_calls": 12}  # noqa: RUF012 - never changed, as little as the tasks
    reward_range = (0.0, UNCHECKED)
    replayable = True

    async def reset(self, expression: str, ctx: Context) -> str:
        luck = random.Random(f"{ctx.seed}/{ctx.episode_id}")
        self.total = evaluate(expression)
        self.left = expression.split()
        self.misread_at = luck.randrange(NUM_AMOUNTS - 1) if luck.random() < MISREAD else -1
        self.excess = luck.choice((10, 20, 30))
        self.num_steps = self.num_refused = 0
        self.is_checked = False
        self.answer: str | None = None
        return question(expression)

    async def calculate(self, expression: str) -> str:
        """Add an entry to the total; then comes the next.

        Args:
            expression: the total and the entry
        """
        step = self.left[:3]
        if len(step) < 3 or expression.split() != step:
            self.num_refused += 1
            raise ValueError(refusal(self.left))
        result = evaluate(expression) + (self.excess if self.num_steps == self.misread_at else 0)
        self.num_steps += 1
        self.left = [str(result), *self.left[3:]]
        return shown(self.left)

    async def check(self) -> str:
        """Add up all again."""
        if len(self.left) > 1:
            raise ValueError(refusal(self.left))
        self.is_checked = True
        return str(self.total)

    async def on_message(self, text: str) -> None:
        """Words instead of a call are the answer, and end the episode."""
        self.answer = text

    async def get_reward(self, ctx: Context) -> float:
        ctx.metric("num_refused", self.num_refused)
        ctx.metric("is_checked", self.is_checked)
        if self.answer is None or len(self.left) > 1 or not self.answer.strip().isdecimal():
            return NOTHING
        if self.answer.strip() != str(self.total):
            return 0.0
        return CHECKED if self.is_checked else UNCHECKED
