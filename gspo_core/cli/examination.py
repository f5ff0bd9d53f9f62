"""An environment examined in a process apart, told of while it lasts.

Rule: an environment may print what it likes, read what is typed, end its process, or start others: none of it reaches
the caller's output beyond ``SHOWN_BYTES``, and nothing outlives the examination.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING

from gspo_core.descendants import how_it_ended
from gspo_core.json_value import JSON

if TYPE_CHECKING:
    from gspo_core.testing import Check, EnvironmentReport

SHOWN_BYTES = 64 << 10
READ_BYTES = 1 << 16
ENDING_S = 2.0
"""For what still stands in a pipe whose writers have ended."""
MIB = 1 << 20


def examine(
    order: Mapping[str, JSON], found: Callable[[Check], None], still: Callable[[str, float], None]
) -> EnvironmentReport:
    """Calls ``found`` with each finding as it is made, and ``still`` with what has lasted for some seconds."""
    from gspo_core.testing import Check, EnvironmentReport, Status

    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer, _listening(found, still) as telling:
        given = json.dumps({**order, "descriptor": answer.fileno(), "telling": telling})
        program = [sys.executable, "-m", "gspo_core.keeper", "gspo_core.testing", given]
        with subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(answer.fileno(), telling),
        ) as process:
            assert process.stdout is not None
            passing = threading.Thread(target=pass_on, args=(process.stdout, sys.stderr), daemon=True)
            passing.start()
            try:
                status = process.wait()
            except BaseException:  # Ctrl-C above all
                process.kill()
                raise
            passing.join(ENDING_S)
        answer.seek(0)
        text = answer.read()
    if text:
        return EnvironmentReport.from_json(json.loads(text))
    ended = f"it ended the process that it ran in ({how_it_ended(status)})"
    failed = Check("process", Status.FAIL, ended)
    found(failed)
    return EnvironmentReport(str(order["ref"]), [failed])


@contextlib.contextmanager
def _listening(found: Callable[[Check], None], still: Callable[[str, float], None]) -> Iterator[int]:
    """The descriptor to tell of findings on, until it is closed everywhere."""
    ours, theirs = os.pipe()
    listening = threading.Thread(target=_listen, args=(os.fdopen(ours, "rb"), found, still), daemon=True)
    listening.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        listening.join(ENDING_S)


def _listen(lines: IO[bytes], found: Callable[[Check], None], still: Callable[[str, float], None]) -> None:
    from gspo_core.testing import Check

    with lines:
        for line in lines:
            told = json.loads(line)
            if "check" in told:
                found(Check.from_json(told["check"]))
            else:
                still(told["act"], told["seconds"])


def pass_on(printed: IO[bytes], to: IO[str]) -> None:
    """What an environment prints: its beginning, and how much there was."""
    num_bytes = 0
    while piece := os.read(printed.fileno(), READ_BYTES):
        shown = piece[: max(0, SHOWN_BYTES - num_bytes)]
        num_bytes += len(piece)
        if shown:
            to.write(shown.decode(errors="replace"))
            to.flush()
    if num_bytes > SHOWN_BYTES:
        print(
            f"\n... it printed {num_bytes / MIB:.1f} MiB, of which {SHOWN_BYTES >> 10} KiB are shown",
            file=to,
            flush=True,
        )
