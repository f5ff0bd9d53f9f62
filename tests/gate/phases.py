"""A phase of the gate: a command whose words are shown as they come, kept in a file, and bounded in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOO_LONG = 124
"""The status of what ran past its limit."""


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


def run(phase: Phase, logs: Path, more: Mapping[str, str] | None = None) -> Done:
    """``more``: further environment variables."""
    logs.mkdir(parents=True, exist_ok=True)
    log, begun = logs / f"{phase.name.replace(' ', '-')}.log", time.monotonic()
    process = subprocess.Popen(
        phase.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(more or {})},
        start_new_session=True,
    )
    ran_out = threading.Event()
    clock = threading.Timer(phase.limit_s, _end, (process, ran_out))
    clock.start()
    assert process.stdout is not None
    with process.stdout, log.open("wb") as kept:
        while chunk := process.stdout.read1(65536):  # type: ignore[attr-defined]  # a buffered pipe has it
            kept.write(chunk)
            kept.flush()
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    status = process.wait()
    clock.cancel()
    return Done(phase, TOO_LONG if ran_out.is_set() else status, time.monotonic() - begun, log)


def _end(process: subprocess.Popen[bytes], ran_out: threading.Event) -> None:
    ran_out.set()
    os.killpg(process.pid, signal.SIGKILL)
