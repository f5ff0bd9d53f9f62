"""A phase of the gate: a command whose words are shown as they come, kept in a file, and bounded in time.

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
    logs.mkdir(parents=True, exist_ok=True)
    log, begun = logs / f"{phase.name.replace(' ', '-')}.log", time.monotonic()
    with log.open("wb") as kept:
        process = subprocess.Popen(
            phase.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(more or {})},
            start_new_session=True,
        )
        assert process.stdout is not None
        showing = threading.Thread(target=_show, args=(process.stdout, kept), daemon=True)
        showing.start()
        try:
            status = process.wait(phase.limit_s)
        except subprocess.TimeoutExpired:
            status = TOO_LONG
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            showing.join(LAST_WORDS_S)
    return Done(phase, status, time.monotonic() - begun, log)


def _show(words: IO[bytes], kept: IO[bytes]) -> None:
    # The file is closed under a thread that still waits for words of what was left behind.
    with words, contextlib.suppress(ValueError, OSError):
        while chunk := os.read(words.fileno(), 65536):
            kept.write(chunk)
            kept.flush()
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
