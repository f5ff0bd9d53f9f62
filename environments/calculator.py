"""Arithmetic with a calculator: a question, a tool call, its result, and the number as the answer.

The smallest built-in world, written as a user writes one: a plain class on the public contract, no imports of ours.
The tool reads an expression as a syntax tree and knows three operators; nothing is ever evaluated as Python.
"""

import ast
import operator
import random

NUM_TRAIN_TASKS = 2000
NUM_EVAL_TASKS = 200

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_CHARACTERS = frozenset("0123456789+-*() ")
# Keeps a policy from writing a product that takes seconds to compute or fills its context.
_MAX_EXPRESSION_CHARS = 60


def evaluate(expression: str) -> int:
    """The value of whole numbers joined by + - * and parentheses. Raises ``ValueError`` for anything else."""
    if len(expression) > _MAX_EXPRESSION_CHARS:
        raise ValueError("the expression is too long")
    if not _CHARACTERS.issuperset(expression):
        raise ValueError("only whole numbers and + - * are known")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError):
        raise ValueError("not an expression") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value: int = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return value
    raise ValueError("only whole numbers and + - * are known")


def _make_tasks() -> list[dict[str, str]]:
    """Distinct expressions of two or three operands, the same in every process."""
    generator = random.Random("calculator")
    expressions: dict[str, None] = {}
    while len(expressions) < NUM_TRAIN_TASKS + NUM_EVAL_TASKS:
        expression = str(generator.randint(10, 99))
        for _ in range(generator.choice((1, 2))):
            expression += f" {generator.choice('+-*')} {generator.randint(10, 99)}"
        expressions[expression] = None
    return [{"expression": expression} for expression in expressions]


_TASKS = _make_tasks()


class Calculator:
    """Use the calculator. Then answer with the number only."""

    tasks = _TASKS[:NUM_TRAIN_TASKS]
    eval_tasks = _TASKS[NUM_TRAIN_TASKS:]
    limits = {"max_turns": 4, "max_tool_calls": 3}  # noqa: RUF012 - never changed, as little as the tasks
    reward_range = (0.0, 1.0)
    replayable = True

    def reset(self, expression: str) -> str:
        self.result = evaluate(expression)
        self.answer = ""
        return f"What is {expression}?"

    def calculate(self, expression: str) -> str:
        """Compute an expression.

        Args:
            expression: numbers joined by + - *
        """
        return str(evaluate(expression))

    def on_message(self, text: str) -> None:
        """Words instead of a call are the answer, and end the episode."""
        self.answer = text

    def get_reward(self) -> float:
        return float(self.answer.strip() == str(self.result))

    @staticmethod
    def oracle(expression: str) -> list[str | tuple[str, dict[str, str]]]:
        """The ideal turns: one call, then its result."""
        return [("calculate", {"expression": expression}), str(evaluate(expression))]
