"""A phase of the gate: a command whose words are kept in a file and shown, and which is bounded in time.

Whatever ends the gate ends the phase that runs. A phase is over with its command: what that left behind may keep its
end of the pipe, and is not waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

TOO_LONG = 124
"""The status of what ran past its limit."""
LAST_WORDS_S = 10.0


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Done:
    phase: Phase
    status: int
    seconds: float
    log: Path

    @property
    def is_ok(self) -> bool:
        return self.status == 0

    def words(self, count: int) -> list[str]:
        """Its last lines that are not empty."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-count:]


def end_with_us() -> None:
    """A signal to end is an exception like another: what runs is ended on the way out."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def run(phase: Phase, logs: Path, more: Mapping[str, str] | None = None) -> Done:
    """``more``: further environment variables."""
    return together([phase], logs, more)[0]


def together(phases: Sequence[Phase], logs: Path, more: Mapping[str, str] | None = None) -> list[Done]:
    """Side by side. The words of the first are shown as they come, those of each other one when all are over."""
    logs.mkdir(parents=True, exist_ok=True)
    running: list[_Running] = []
    try:
        for phase in phases:
            running.append(_Running(phase, logs, more or {}, is_shown=not running))
        done = [one.done() for one in running]
    finally:
        for one in running:
            one.end()
    for other in done[1:]:
        sys.stdout.buffer.write(other.log.read_bytes())
        sys.stdout.buffer.flush()
    return done


class _Running:
    def __init__(self, phase: Phase, logs: Path, more: Mapping[str, str], *, is_shown: bool) -> None:
        self._phase, self._log = phase, logs / f"{phase.name.replace(' ', '-')}.log"
        self._begun = time.monotonic()
        self._status, self._ended = TOO_LONG, self._begun
        self._kept = self._log.open("wb")
        self._process = subprocess.Popen(
            phase.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **more},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._showing = threading.Thread(target=_show, args=(self._process.stdout, self._kept, is_shown), daemon=True)
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._showing.start()
        self._waiting.start()

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._status = self._process.wait(self._phase.limit_s)
        self._ended = time.monotonic()
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def done(self) -> Done:
        self._waiting.join()
        return Done(self._phase, self._status, self._ended - self._begun, self._log)

    def end(self) -> None:
        # Not by its thread: one that an exception took us from while we joined it counts as over.
        if self._process.poll() is None:
            self._kill()
        self._process.wait()
        self._showing.join(LAST_WORDS_S)
        self._kept.close()


def _show(words: IO[bytes], kept: IO[bytes], is_shown: bool) -> None:
    # The file is closed under a thread that still waits for words of what was left behind.
    with words, contextlib.suppress(ValueError, OSError):
        while chunk := os.read(words.fileno(), 65536):
            kept.write(chunk)
            kept.flush()
            if not is_shown:
                continue
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
