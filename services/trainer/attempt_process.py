"""The trainer's side of an attempt process: starts it, exchanges messages with it, and reaps it.

Each attempt runs in its own process because only that cleans up completely: threads that load a model or replay a log
cannot be cancelled, and torch's random generator and GPU memory belong to the whole process.

Rules: start the process ahead of time, so that no job waits for the torch import. Each process runs one attempt and
exits before the next one starts. It never outlives the trainer. Its stderr goes to ours, line by line. The worker, not
this module, decides how its end affects the job.
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
from services.process.cancelling import cancel_all, sleep_unless
from services.process.children import die_with_parent
from services.process.telemetry import get_logger
from services.state.jobs import HANDED_OVER
from services.state.store import Claim
from services.trainer.telling.attempt_messages import (
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
# Time for an ending attempt to free its engines before we kill it.
STOP_S = 10.0
# The same after a lost claim, or when the trainer is in a hurry.
GIVE_UP_S = 5.0
# Time to read the remaining output of an exited process.
DRAIN_S = 1.0
# Treat an event loop silent for this long as hung. Until then the worker keeps sending heartbeats.
SILENCE_S = 60.0
_NUM_LAST_WORDS = 5
_MAX_LAST_WORDS = 1000
_READ_BYTES = 1 << 16
# So many may be killed in a row while they stand by: by then it is no accident, and there may be too little memory.
MAX_KILLED = 5
_MAX_LINE = 1 << 20


class NotStarted(RuntimeError):
    """An attempt process exited before it received an attempt."""


class Started(Protocol):
    """The part of ``subprocess.Popen`` used here."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> int: ...


Start: TypeAlias = Callable[[int, int, int], Started]
"""Starts ``attempt_main`` with these file descriptors as stdin, stdout and stderr; it dies with this process."""


def start_python(stdin: int, stdout: int, stderr: int) -> Started:
    """Start a new interpreter in its own session, so that Ctrl-C reaches only the trainer."""
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
    """One attempt process, from start to exit."""

    def __init__(self, start: Start = start_python) -> None:
        (stdin, orders), (answers, stdout), (errors, stderr) = os.pipe(), os.pipe(), os.pipe()
        try:
            self._started = start(stdin, stdout, stderr)
        finally:
            for one in (stdin, stdout, stderr):
                os.close(one)
        self._orders = os.fdopen(orders, "wb", 0)
        self.capabilities: Capabilities | None = None
        """None until the process is ready."""
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

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, which says nothing about the next one."""
        return self.has_exited and self._exit.result() < 0

    def obituary(self) -> str:
        """Describe the exit, with the last lines of stderr."""
        said = " / ".join(line.strip() for line in self._last_words)[-_MAX_LAST_WORDS:]
        return describe(self._exit.result()) + (f"; last lines of stderr: {said}" if said else "")

    async def run(self, claim: Claim, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        """Run the attempt and wait until the process is gone."""
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
        """Wait until the attempt reports its end, exits, or must stop; return True if it hangs."""
        silent_s, heard, is_told = 0.0, -1, False
        while not (stop.is_set() or self._hearing.done() or self._end is not None):
            if leaving.is_set() and not is_told:
                is_told = True
                self._say(Leave())
            # Count polls, not time: a suspended machine does not count as silence.
            silent_s = silent_s + LOOK_S if heard == self._num_answers else 0.0
            heard = self._num_answers
            if silent_s >= SILENCE_S:
                return True
            await asyncio.wait({self._hearing}, timeout=LOOK_S)
        return False

    async def end(self, patience_s: float) -> None:
        """Ask the process to stop, kill it after ``patience_s``, and return when it is gone.

        On cancellation, kill the process and still wait for its exit, because later code relies on it.
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
        # The pipes may still contain its last output, and a child of the process may hold them open.
        reading = [self._hearing, self._forwarding]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(reading, timeout=DRAIN_S)
        await cancel_all(reading)
        if was_cancelled:
            raise asyncio.CancelledError

    def _say(self, order: Order) -> None:
        with contextlib.suppress(BrokenPipeError):  # other code handles its exit
            self._orders.write(encode(order))

    async def _hear(self, fd: int) -> None:
        async with _lines(fd) as answers:
            while line := await answers.readline():
                self._num_answers += 1
                match decode_answer(line):
                    case Ready(capabilities):
                        # Users see and stop the trainer's process.
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
        # Skip our JSON log lines: they say what it did, not why it ended.
        self._last_words.extend(line for line in text if line.strip() and not line.startswith("{"))


class AttemptProcesses:
    """Keeps one process that runs the current attempt or stands by for the next; ends it on leaving ``async with``."""

    _next: AttemptProcess

    def __init__(self, start: Start = start_python) -> None:
        self._start = start
        self._num_killed = 0
        """Killed in a row while they stood by."""
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._next = AttemptProcess(self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.gather(self._next.end(0.0), *self._closing)

    @property
    def pid(self) -> int:
        """Pid of the process that runs the current attempt or will run the next."""
        return self._next.pid

    async def capabilities(self, stop: asyncio.Event) -> Capabilities | None:
        """Wait for the first process to be ready; return None if ``stop`` comes first. Raises NotStarted."""
        while not (self.is_ready() or stop.is_set()):
            await sleep_unless(stop, LOOK_S)
        return self._next.capabilities

    def is_ready(self) -> bool:
        """Return whether the process can take an attempt. Raises NotStarted."""
        if self._next.has_exited:
            self._replace_killed()
        return self._next.capabilities is not None

    def _replace_killed(self) -> None:
        obituary = self._next.obituary()
        self._num_killed += 1
        if not self._next.was_killed or self._num_killed > MAX_KILLED:
            raise NotStarted(f"cannot train any job here: the process for the next attempt {obituary}")
        get_logger().warning("restarting the process for the next attempt", why=obituary)
        closing = asyncio.create_task(self._next.end(0.0), name="closing")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._next = AttemptProcess(self._start)

    async def run(self, claim: Claim, _spec: JobSpec, stop: asyncio.Event, leaving: asyncio.Event) -> AttemptEnd:
        get_logger().debug("the attempt runs in a process of its own", job=claim.job_id, attempt_pid=self.pid)
        self._num_killed = 0
        try:
            return await self._next.run(claim, stop, leaving)
        finally:
            self._next = AttemptProcess(self._start)


def describe(status: int) -> str:
    """Describe the exit status of a process."""
    if status >= 0:
        return f"ended with code {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", possibly for lack of memory" if name == "SIGKILL" else "")


@contextlib.asynccontextmanager
async def _lines(fd: int) -> AsyncIterator[asyncio.StreamReader]:
    reader = asyncio.StreamReader(limit=_MAX_LINE)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", 0))
    try:
        yield reader
    finally:
        transport.close()
