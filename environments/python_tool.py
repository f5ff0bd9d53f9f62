"""Questions that a few lines of Python answer, with an interpreter whose variables stay between calls.

The interpreter is Monty (`pydantic-monty`): a subset of Python in worker processes without files, network or host
objects, each enclosed (`environments.sandbox.enclosed`): code that escaped the interpreter would still reach no file,
and not the session that judges it. A command of a sandbox for each call would be no stronger, cost a process each time,
and forget the variables. An episode holds no worker: its state is bytes between two calls, and is also its snapshot,
so that it goes on in another process from where it stood.
"""

# /// script
# dependencies = ["pydantic-monty==1.4.0"]
# ///

from __future__ import annotations

import atexit
import random
import shutil
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from environments.sandbox.enclosed import enclosed
from gspo_core.env import Context

if TYPE_CHECKING:
    from pydantic_monty import Monty

NUM_TRAIN_TASKS, NUM_EVAL_TASKS = 1000, 100
MAX_CODE_CHARS, MAX_OUTPUT_CHARS = 8_000, 4_000
# State comes from an untrusted program: opaque, and bounded.
MAX_STATE_BYTES = 1 << 20
# For all calls of an episode together, however many a job allows.
RUN_S = 20.0
_LIMITS = {"max_memory": 64 << 20, "max_feed_duration_secs": 2.0, "max_recursion_depth": 200}


def _primes(draw: random.Random) -> tuple[str, str]:
    low, width = draw.randint(100, 5000), draw.randint(200, 900)
    code = f"sum(1 for n in range({low}, {low + width}) if n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1)))"
    return f"How many primes p are there with {low} <= p < {low + width}?", code


def _digits(draw: random.Random) -> tuple[str, str]:
    base, power = draw.randint(3, 19), draw.randint(20, 90)
    return (
        f"What is the sum of the decimal digits of {base} to the power {power}?",
        f"sum(map(int, str({base}**{power})))",
    )


def _recurrence(draw: random.Random) -> tuple[str, str]:
    first, factor, addend = draw.randint(1, 99), draw.randint(3, 49), draw.randint(1, 99)
    modulus, steps = draw.randint(500, 5000), draw.randint(20, 80)
    code = f"x = {first}\nfor _ in range({steps}):\n    x = (x * {factor} + {addend}) % {modulus}\nx"
    return (
        f"A sequence begins with {first}. Each next number is ({factor} times the last plus {addend}) modulo "
        f"{modulus}. Which number stands {steps} places after the first?"
    ), code


def _collatz(draw: random.Random) -> tuple[str, str]:
    start = draw.randint(10, 9999)
    code = f"n, k = {start}, 0\nwhile n != 1:\n    n, k = (n // 2 if n % 2 == 0 else 3 * n + 1), k + 1\nk"
    return f"Halve {start} if it is even, else triple it and add 1, and so on. After how many steps is it 1?", code


def _make_tasks() -> list[dict[str, str]]:
    draw = random.Random("python tool")
    tasks: dict[str, dict[str, str]] = {}
    while len(tasks) < NUM_TRAIN_TASKS + NUM_EVAL_TASKS:
        question, code = draw.choice((_primes, _digits, _recurrence, _collatz))(draw)
        tasks[question] = {"question": question, "code": code}
    return list(tasks.values())


_TASKS = _make_tasks()


class PythonTool:
    """Answer the question with the Python interpreter. Variables stay between calls. End with the number only."""

    tasks = _TASKS[:NUM_TRAIN_TASKS]
    eval_tasks = _TASKS[NUM_TRAIN_TASKS:]
    limits = {"max_turns": 8, "max_tool_calls": 8}  # noqa: RUF012 - never changed
    reward_range = (0.0, 1.0)

    def reset(self, question: str, code: str) -> str:
        self._expected, _, _ = _feed(b"", code)
        self._said = ""
        self._state, self._used_s = b"", 0.0
        return question

    def python(self, code: str, ctx: Context) -> str:
        """Run Python. The value of the last line is shown, and what is printed.

        Args:
            code: one or more lines
        """
        if len(code) > MAX_CODE_CHARS:
            raise ValueError(f"at most {MAX_CODE_CHARS} characters of code")
        if self._used_s >= RUN_S:
            raise ValueError("the time for this task is over: answer with what you know")
        began = time.monotonic()
        try:
            value, printed, state = _feed(self._state, code)
        finally:
            self._used_s += time.monotonic() - began
            ctx.metric("python_s", self._used_s)
        if len(state) > MAX_STATE_BYTES:
            raise ValueError("the variables take too much room; the interpreter is as it was before this call")
        self._state = state
        shown = printed if value is None else f"{printed}{value!r}"
        return shown[:MAX_OUTPUT_CHARS] or "(nothing)"

    def on_message(self, text: str) -> None:
        """Words instead of a call are the answer, and end the episode."""
        self._said = text

    def snapshot(self) -> bytes:
        expected, said = str(self._expected).encode(), self._said.encode()
        lengths = len(expected).to_bytes(4, "big") + len(said).to_bytes(4, "big")
        return _version() + struct.pack("<d", self._used_s) + lengths + expected + said + self._state

    def restore(self, state: bytes) -> None:
        version = _version()
        if not state.startswith(version):
            raise ValueError("the snapshot is of another version of the interpreter")
        (self._used_s,) = struct.unpack_from("<d", state, len(version))
        rest = state[len(version) + 8 :]
        num_expected, num_said = int.from_bytes(rest[:4], "big"), int.from_bytes(rest[4:8], "big")
        rest = rest[8:]
        self._expected = int(rest[:num_expected])
        self._said = rest[num_expected : num_expected + num_said].decode()
        self._state = rest[num_expected + num_said :]

    def get_reward(self) -> float:
        return float(self._said.strip() == str(self._expected))

    @staticmethod
    def oracle(question: str, code: str) -> list[str | tuple[str, dict[str, str]]]:
        """A perfect policy's turns."""
        value, _, _ = _feed(b"", code)
        return [("python", {"code": code}), str(value)]


class CodeError(Exception):
    """What the interpreter says of the policy's code."""


_pool: Monty | None = None
_pool_lock = threading.Lock()


def _workers() -> Monty:
    """The interpreters of this process, started when the first code is run: a host forks before that."""
    global _pool
    import pydantic_monty

    with _pool_lock:
        if _pool is None:
            _pool = pydantic_monty.Monty(binary_path=enclosed(_interpreter()), request_timeout=10.0)
            _pool.__enter__()
            atexit.register(_pool.__exit__, None, None, None)
        return _pool


def _interpreter() -> Path:
    """The program that comes with the package, beside the interpreter that runs this."""
    found = shutil.which("monty", path=str(Path(sys.executable).parent)) or shutil.which("monty")
    if found is None:
        raise FileNotFoundError("the program monty of pydantic-monty is not installed")
    return Path(found)


def _feed(state: bytes, code: str) -> tuple[object, str, bytes]:
    """Runs ``code`` on ``state``: its value, what it printed, the state behind it. Raises ``CodeError``."""
    import pydantic_monty

    printed: list[str] = []
    room = MAX_OUTPUT_CHARS

    def keep(stream: str, text: str) -> None:
        nonlocal room
        printed.append(text[: max(0, room)])
        room -= len(text)

    with _workers().checkout(limits=_LIMITS) as session:
        if state:
            session.load_session(state)
        try:
            value = session.feed_run(code, print_callback=keep)
            return value, "".join(printed), session.dump()
        except pydantic_monty.MontyError as error:
            raise CodeError(f"{''.join(printed)}{str(error).splitlines()[0]}") from None


def _version() -> bytes:
    import importlib.metadata

    return f"monty {importlib.metadata.version('pydantic-monty')}, 2\n".encode()  # 2: with the time used
