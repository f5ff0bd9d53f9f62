"""One run of an agent, from its start to its end: a function, or a program.

Rule: a run blocks the thread that it is given and no other, whatever its author does; ``cancel`` comes from another
thread and asks it to end. What an agent is told is the task, a base URL and a key, and nothing else of ours.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from gspo_core.environment_contract import Llm
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    import asyncio

# Linux takes no longer variable; a task beyond that belongs into a file.
MAX_VARIABLE_BYTES = (128 << 10) - 32
MAX_OUTPUT_BYTES = 1 << 20
MAX_LAST_WORDS_BYTES = 2000
# What is told of a program is cut somewhere, perhaps in a key. Of one that has 90 fewer characters give nothing away.
PART_CHARS = 8
KEY_SHOWN = "(key)"


class AgentFailed(Exception):
    """The agent did not end as it should."""


class AgentRun(Protocol):
    def run(self) -> object:
        """Blocks until the agent has ended; what it returned. Raises what went wrong."""
        ...

    def cancel(self) -> None:
        """Asks ``run`` to end soon. From another thread, at any time, also before ``run``."""
        ...


class FunctionRun:
    """``run(task, llm)``. A coroutine function gets an event loop of its own: it may block that without harm."""

    def __init__(self, function: Callable[..., object], /, *arguments: object, **keywords: object) -> None:
        self._function, self._arguments, self._keywords = function, arguments, keywords
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    def run(self) -> object:
        import asyncio

        returned = self._function(*self._arguments, **self._keywords)
        return asyncio.run(self._awaited(returned)) if inspect.isawaitable(returned) else returned

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _awaited(self, returned: object) -> object:
        import asyncio

        assert inspect.isawaitable(returned)
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        assert self._task is not None
        if self._is_cancelled:
            self._task.cancel()
        return await returned


class CommandRun:
    """A program in a process of its own; what it writes is kept for a judge and is no protocol."""

    def __init__(
        self, command: Sequence[str], task: Mapping[str, JSON], llm: Llm, *, folder: Path, scratch: Path
    ) -> None:
        """``folder``: where it runs. ``scratch``: for what it writes, here and as its TMPDIR."""
        self._command, self._folder, self._scratch = command, folder, scratch
        self._variables = variables_for(task, llm)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_cancelled = False

    def run(self) -> str:
        # In files, because an unread pipe would block it.
        with (self._scratch / "stdout").open("w+b") as output, (self._scratch / "stderr").open("w+b") as errors:
            self._process = self._start(output, errors)
            if self._is_cancelled:
                self.cancel()
            status = self._process.wait()
            if status:
                how = f"signal {-status}" if status < 0 else f"exit status {status}"
                words = end_of(errors, MAX_LAST_WORDS_BYTES) or end_of(output, MAX_LAST_WORDS_BYTES)
                raise AgentFailed(f"{self._command[0]} ended with {how}: {words.strip() or 'no output'}")
            return end_of(output, MAX_OUTPUT_BYTES)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _start(self, output: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            # In the process group of the session's process, so that it ends with that at the latest.
            return subprocess.Popen(
                self._command,
                env={**os.environ, **self._variables, "TMPDIR": str(self._scratch)},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        except OSError as error:
            raise AgentFailed(f"{self._command[0]} cannot be started: {error}") from error


def variables_for(task: Mapping[str, JSON], llm: Llm) -> dict[str, str]:
    """What a program is told, as environment variables. Raises ``AgentFailed``."""
    try:
        text = json.dumps(task, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AgentFailed(f"the task is not JSON: {error}") from None
    if len(text.encode()) > MAX_VARIABLE_BYTES:
        raise AgentFailed(
            f"the task has {len(text.encode())} bytes, but a variable holds {MAX_VARIABLE_BYTES}; put what is long "
            "into a file and its path into the task"
        )
    return {
        "GSPO_TASK": text,
        "OPENAI_BASE_URL": llm.base_url,
        "OPENAI_API_KEY": llm.api_key,
        "ANTHROPIC_BASE_URL": llm.anthropic_base_url,
        "ANTHROPIC_API_KEY": llm.api_key,
        "GOOGLE_GEMINI_BASE_URL": llm.gemini_base_url,
        "GEMINI_API_KEY": llm.api_key,
    }


def end_of(file: IO[bytes], most_bytes: int) -> str:
    """The last bytes of it, as text."""
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - most_bytes))
    return file.read(most_bytes).decode("utf-8", "replace")


def without_key(text: str, key: str) -> str:
    """Nor is a beginning of it told, nor an end, that a cut has left."""
    if not key:
        return text
    least = min(PART_CHARS, len(key))
    begins, ends = key[:least], key[-least:]
    first, *rest = text.split(begins)
    more = [one[_num_equal(one, key[least:]) :] for one in rest]
    *rest, last = KEY_SHOWN.join([first, *more]).split(ends)
    fewer = [one[: len(one) - _num_equal(one[::-1], key[:-least][::-1])] for one in rest]
    return KEY_SHOWN.join([*fewer, last])


def _num_equal(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def remove(folder: Path) -> None:
    """As far as it can be: what an agent left running may still write there, and its folders may be too deep."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
