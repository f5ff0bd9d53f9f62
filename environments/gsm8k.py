"""Grade-school word problems in the public file format of GSM8K, with a calculator; the reward is the exact answer.

A small generated file ships; ``config: {path: DIRECTORY}`` takes the real problems, as they were first published
(``train.jsonl`` and ``test.jsonl``) or as the hub's ``openai/gsm8k`` has them (``main/train-*.parquet``). A line is
``{"question": ..., "answer": "worked steps\\n#### 72"}``. Nothing that the policy writes is evaluated as Python.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

_BUNDLED = Path(__file__).with_name("data")
_FINAL = re.compile(r"####\s*(-?\$?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_EXPRESSION_CHARS = 200
# Products of products grow without bound; no problem of this kind comes near.
_MAX_VALUE = Fraction(10) ** 30


def evaluate(expression: str) -> Fraction:
    """The exact value of numbers joined by + - * / and parentheses. Raises ``ValueError`` for anything else."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError("the expression is too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        if node.value > _MAX_VALUE:
            raise ValueError("the number is too large")
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers and + - * / are known")
    if abs(value) > _MAX_VALUE or value.denominator > _MAX_VALUE:
        raise ValueError("the result is too large")
    return value


def shown(value: Fraction) -> str:
    """Whole where it is, else with at most six decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")


def final_answer(text: str) -> Fraction | None:
    """The number behind the last ``####``, else the last number of the text."""
    found: list[str] = _FINAL.findall(text) or _NUMBER.findall(text)
    try:
        return Fraction(found[-1].replace(",", "").replace("$", "")) if found else None
    except ValueError:
        return None


def read_problems(path: Path) -> list[dict[str, str]]:
    """Raises ``ValueError`` that names the line which is not in the format."""
    rows: Sequence[str | dict[str, str]] = (
        _table(path) if path.suffix == ".parquet" else path.read_text(encoding="utf-8").split("\n")
    )
    return [_problem(row, f"{path}, line {number}") for number, row in enumerate(rows, 1) if row]


def _problem(row: str | dict[str, str], where: str) -> dict[str, str]:
    try:
        read = json.loads(row) if isinstance(row, str) else row
        if _FINAL.search(read["answer"]) is None or not read["question"].strip():
            raise ValueError("no question, or no answer behind ####")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from None
    return {"question": read["question"], "answer": read["answer"]}


def _table(path: Path) -> list[dict[str, str]]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ValueError(f"{path} is Parquet: pip install -c constraints.txt -e '.[parquet]'") from None
    rows: list[dict[str, str]] = parquet.read_table(path, columns=["question", "answer"]).to_pylist()
    return rows


class GSM8K:
    """Solve the problem step by step, with the calculator where it helps. End with the answer: #### and the number."""

    limits = {"max_turns": 8, "max_tool_calls": 16}  # noqa: RUF012 - never changed
    reward_range = (0.0, 1.0)
    replayable = True

    def __init__(self, path: str | None = None) -> None:
        directory = Path(path) if path is not None else _BUNDLED
        prefix = "" if path is not None else "gsm8k_generated_"
        self._files = _files(directory, f"{prefix}train"), _files(directory, f"{prefix}test")

    @property
    def tasks(self) -> list[dict[str, str]]:
        return _problems(self._files[0])

    @property
    def eval_tasks(self) -> list[dict[str, str]]:
        return _problems(self._files[1])

    def reset(self, question: str, answer: str) -> str:
        self._expected = final_answer(answer)
        self._said = ""
        return question

    def calculate(self, expression: str) -> str:
        """Compute an expression exactly.

        Args:
            expression: numbers joined by + - * / and parentheses
        """
        return shown(evaluate(expression))

    def on_message(self, text: str) -> None:
        """Words instead of a call are the answer, and end the episode."""
        self._said = text

    def get_reward(self) -> float:
        return float(self._expected is not None and final_answer(self._said) == self._expected)

    @staticmethod
    def oracle(question: str, answer: str) -> list[str | tuple[str, dict[str, str]]]:
        """A perfect policy's turns: each annotated step with the calculator, then the answer."""
        steps = re.findall(r"<<([^=<>]*)=", answer)
        calls: list[str | tuple[str, dict[str, str]]] = [("calculate", {"expression": step}) for step in steps]
        return [*calls, f"#### {answer.rpartition('####')[2].strip()}"]


def _files(directory: Path, split: str) -> tuple[Path, ...]:
    """Those of a split; the lines win. A directory without either is refused by the name that is expected first."""
    lines = directory / f"{split}.jsonl"
    return (lines,) if lines.is_file() else tuple(sorted(directory.glob(f"main/{split}-*.parquet"))) or (lines,)


_read: dict[tuple[Path, ...], list[dict[str, str]]] = {}


def _problems(paths: tuple[Path, ...]) -> list[dict[str, str]]:
    """Read once in a process: every episode makes an instance."""
    if paths not in _read:
        _read[paths] = [row for path in paths for row in read_problems(path)]
    return _read[paths]
