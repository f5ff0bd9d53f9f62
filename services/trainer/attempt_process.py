"""The process in which one attempt runs, seen from the trainer that starts it, talks to it and buries it.

An attempt has a process of its own because nothing else ends all of it: a thread that loads a model or replays a log
cannot be cancelled, torch's random generator belongs to the whole process, and so does the memory of a GPU.

Rules: the process is started ahead of time, so that no job waits for the import of torch; it runs one attempt and ends;
the next one is started only when it is gone. It never outlives the trainer. What it says on stderr goes to ours, line
by line. What its end means for the job is decided by the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from gspo_core.spec import JobSpec
from services.process.cancelling import cancel_all
from services.process.children import die_with_parent
from services.process.first_to_end import sleep_unless
from services.process.telemetry import get_logger
from services.state.jobs import HANDED_OVER
from services.state.store import Claim
from services.trainer.attempt_messages import (
    Alive,
    AttemptEnd,
    Begin,
    Capabilities,
    Leave,
    Order,
    Ready,
    Stop,
    decode_answer,
    encode,
)

LOOK_S = 0.2
# What an attempt may take to free its engines once it is to end, before it is killed.
STOP_S = 10.0
# The same where its claim was lost, or the trainer is in a hurry.
GIVE_UP_S = 5.0
# What a process that is gone has said is read by then.
DRAIN_S = 1.0
# An event loop that does not turn for so long hangs. Until then the worker beats for it.
SILENCE_S = 60.0
_NUM_LAST_WORDS = 5
_MAX_LAST_WORDS = 1000
_READ_BYTES = 1 << 16
_MAX_LINE = 1 << 20


class NotStarted(RuntimeError):
    """The process of an attempt ended before it was given one."""


class Started(Protocol):
    """As much of ``subprocess.Popen`` as is needed."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> int: ...


Start: TypeAlias = Callable[[int, int, int], Started]
"""Starts ``attempt_main`` with these as its standard input, output and error; it dies with this process."""


def start_python(stdin: int, stdout: int, stderr: int) -> Started:
    """A fresh interpreter, in a session of its own: Ctrl-C is for the trainer, which decides what becomes of it."""
    log_format = os.environ.get("GSPO_LOG_FORMAT") or ("console" if sys.stderr.isatty() else "json")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "services.trainer.attempt_main"],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, "GSPO_LOG_FORMAT": log_format},
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )


class AttemptProcess:
    """One process, from its start to its end."""

    def __init__(self, start: Start = start_python) -> None:
        (stdin, orders), (answers, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
        try:
            self._started = start(stdin, stdout, stderr)
        finally:
            for one in (stdin, stdout, stderr):
                os.close(one)
        self._orders = os.fdopen(orders, "wb", 0)
        self.capabilities: Capabilities | None = None
        """None until it can begin."""
        self._end: AttemptEnd | None = None
        self._num_answers = 0
        self._last_words: deque[str] = deque(maxlen=_NUM_LAST_WORDS)
        self._hearing = asyncio.create_task(self._hear(answers), name="answers")
        self._forwarding = asyncio.create_task(self._forward(errors), name="stderr")
        self._exit = asyncio.create_task(asyncio.to_thread(self._started.wait), name="exit")

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def has_exited(self) -> bool:
        return self._exit.done()

    def obituary(self) -> str:
        """How it ended, with its last words."""
        said = " / ".join(line.strip() for line in self._last_words)[-_MAX_LAST_WORDS:]
        return describe(self._exit.result()) + (f"; its last words: {said}" if said else "")

    async def run(self, claim: Claim, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        """The attempt, to its end and that of the process."""
        self._say(Begin(claim))
        try:
            is_silent = await self._follow(stop, leaving)
        except BaseException:
            await self.end(GIVE_UP_S)
            raise
        await self.end(0.0 if is_silent else STOP_S)
        if self._end is not None:
            return self._end
        if stop.is_set():
            return AttemptEnd.because("released", HANDED_OVER)
        hung = f"did not answer for {SILENCE_S:.0f} s and " if is_silent else ""
        return AttemptEnd("attempt_failed", "process_lost", f"the process of this attempt {hung}{self.obituary()}")

    async def _follow(self, stop: asyncio.Event, leaving: asyncio.Event) -> bool:
        """Until it has told its end, is gone, or is to stop; True: it hangs."""
        silent_s, heard, is_told = 0.0, -1, False
        while not (stop.is_set() or self._hearing.done() or self._end is not None):
            if leaving.is_set() and not is_told:
                is_told = True
                self._say(Leave())
            # Looks are counted instead of time: a machine that was asleep has not been silent.
            silent_s = silent_s + LOOK_S if heard == self._num_answers else 0.0
            heard = self._num_answers
            if silent_s >= SILENCE_S:
                return True
            await asyncio.wait({self._hearing}, timeout=LOOK_S)
        return False

    async def end(self, patience_s: float) -> None:
        """Ask it to stop, kill it after ``patience_s``; returns when it is gone.

        When this is cancelled the process is killed, and its end is still awaited: what comes next relies on it.
        """
        if self._end is None and patience_s > 0:
            self._say(Stop())
        loop = asyncio.get_running_loop()
        was_cancelled, deadline = False, loop.time() + patience_s
        while not self._exit.done():
            left_s = deadline - loop.time()
            if was_cancelled or left_s <= 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            try:
                await asyncio.wait({self._exit}, timeout=left_s if left_s > 0 else LOOK_S)
            except asyncio.CancelledError:
                was_cancelled = True
        self._orders.close()
        # What it said last may still lie in the pipes, which some child of its own may hold open.
        reading = [self._hearing, self._forwarding]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(reading, timeout=DRAIN_S)
        await cancel_all(reading)
        if was_cancelled:
            raise asyncio.CancelledError

    def _say(self, order: Order) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is seen elsewhere
            self._orders.write(encode(order))

    async def _hear(self, fd: int) -> None:
        async with _lines(fd) as answers:
            while line := await answers.readline():
                self._num_answers += 1
                match decode_answer(line):
                    case Ready(capabilities):
                        # The process that people see and stop is the trainer's.
                        self.capabilities = capabilities | {"pid": os.getpid()}
                    case AttemptEnd() as end:
                        self._end = end
                    case Alive():
                        pass

    async def _forward(self, fd: int) -> None:
        rest = b""
        async with _lines(fd) as errors:
            while data := await errors.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                self._pass_on(lines)
            self._pass_on([rest] if rest else [])

    def _pass_on(self, lines: list[bytes]) -> None:
        text = [line.decode(errors="replace") for line in lines]
        for line in text:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
        # Our own log lines say what it did, not why it ended.
        self._last_words.extend(line for line in text if line.strip() and not line.startswith("{"))


class AttemptProcesses:
    """``async with AttemptProcesses() as attempts``: one process is ready for the next attempt, or runs the present
    one. None is left after the block."""

    _next: AttemptProcess

    def __init__(self, start: Start = start_python) -> None:
        self._start = start

    async def __aenter__(self) -> Self:
        self._next = AttemptProcess(self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._next.end(0.0)

    @property
    def pid(self) -> int:
        """Of the process that runs the present attempt, or will run the next."""
        return self._next.pid

    async def capabilities(self, stop: asyncio.Event) -> Capabilities | None:
        """When the first process is there; None if ``stop`` comes before. Raises NotStarted."""
        while not (self.is_ready() or stop.is_set()):
            await sleep_unless(stop, LOOK_S)
        return self._next.capabilities

    def is_ready(self) -> bool:
        """Raises NotStarted."""
        if self._next.has_exited:
            raise NotStarted(f"no job can be trained here: the process of the next attempt {self._next.obituary()}")
        return self._next.capabilities is not None

    async def run(self, claim: Claim, _spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        get_logger().debug("the attempt has a process", job=claim.job_id, attempt_pid=self.pid)
        try:
            return await self._next.run(claim, stop, leaving)
        finally:
            self._next = AttemptProcess(self._start)


def describe(status: int) -> str:
    """The exit status of a process in words."""
    if status >= 0:
        return f"ended with code {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", as when memory runs out" if name == "SIGKILL" else "")


@contextlib.asynccontextmanager
async def _lines(fd: int) -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader(limit=_MAX_LINE)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", 0))
    try:
        yield reader
    finally:
        transport.close()
