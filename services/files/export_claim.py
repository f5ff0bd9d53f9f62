"""Which process writes an export, who is asked to write it, and why the last try failed: files beside it that every
process of an installation can read.

Rule: a claim is a file that its holder touches every ``BEAT_S``; one that was not touched for ``STALE_S`` is free. Two
processes that take the same stale claim in one instant may both hold it: the directory that they write appears once.

A request is left for a trainer by who cannot write the export itself. Whoever does it touches the request, and removes
it before the claim and after what came of it. Who stops early takes its claim along, and the next one may begin; who
dies leaves it, and the next one answers that instead of dying likewise. A request that was not touched for
``PATIENCE_S`` waits in vain: it is answered no more, and counts as a failure until it is asked again.

Times are those of the host that touches: clocks of hosts differ by less than ``STALE_S``.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from gspo_core.position import Position
from services.files.job_dir import JobDir, JobsDir, parse_step_name

BEAT_S = 5.0
STALE_S = 30.0
# A trainer's machine may have to start first.
PATIENCE_S = 600.0
_REQUESTED = ".requested-"
DIED = (
    "the trainer that wrote it ended in the middle, perhaps for want of memory: ask for it when no job trains, or give "
    "its container more memory (docs/operations.md, Models out of containers)"
)
MOST_CHARS = 4000


class ExportClaim:
    """That of one export. All is blocking: call it in a thread where others wait."""

    def __init__(self, export: Path, clock: Callable[[], float] = time.time) -> None:
        self._held = export.with_name(f".exporting-{export.name}")
        self._failed = export.with_name(f".failed-{export.name}")
        self._clock = clock
        self._token = uuid.uuid4().hex

    @property
    def is_held(self) -> bool:
        try:
            return abs(self._clock() - self._held.stat().st_mtime) < STALE_S
        except OSError:
            return False

    @property
    def is_abandoned(self) -> bool:
        """Whether its holder has died."""
        try:
            return abs(self._clock() - self._held.stat().st_mtime) >= STALE_S
        except OSError:
            return False

    @property
    def failure(self) -> str | None:
        """Why the last try failed, if nothing is known of a later one."""
        try:
            return self._failed.read_text()
        except OSError:
            return None

    def take(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Whether it is this one's now. ``is_wanted`` is asked once no other can take it. Raises OSError."""
        if self.is_held:
            return False
        self._held.parent.mkdir(exist_ok=True)  # not the job's: it may have been removed
        self._held.unlink(missing_ok=True)
        try:
            with self._held.open("x") as file:
                self._sign(file)
        except FileExistsError:  # another process was faster
            return False
        self.beat()
        if not is_wanted():
            self.leave()
            return False
        self._failed.unlink(missing_ok=True)
        return True

    def _sign(self, file: IO[str]) -> None:
        try:
            file.write(self._token)
            file.flush()
        except OSError:  # of a full disk: it would seem to be somebody's
            self._held.unlink(missing_ok=True)
            raise

    def beat(self) -> None:
        now = self._clock()
        with contextlib.suppress(OSError):  # its claim becomes stale at worst
            os.utime(self._held, (now, now))

    def leave(self, failure: str | None = None) -> None:
        """Give up the claim; ``failure``: why nothing was written. Raises OSError."""
        if failure is not None:
            self.tell(failure)
        with contextlib.suppress(FileNotFoundError):
            if self._held.read_text() == self._token:
                self._held.unlink()

    def tell(self, failure: str) -> None:
        """Say why nothing was written, before the claim is given up. Raises OSError."""
        self._failed.parent.mkdir(exist_ok=True)
        self._failed.write_text(failure[:MOST_CHARS])

    def bury(self) -> None:
        """Remove that of a dead holder."""
        if self.is_abandoned:
            self._held.unlink(missing_ok=True)

    def forget(self) -> None:
        """Nothing is known of any try."""
        self._failed.unlink(missing_ok=True)


class ExportRequest:
    """The one for an export. Its text is why a trainer that looked cannot do it."""

    def __init__(self, export: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = export.with_name(f"{_REQUESTED}{export.name}")
        self._clock = clock

    @property
    def exists(self) -> bool:
        return self._file.exists()

    @property
    def is_open(self) -> bool:
        """Whether a trainer may still answer it."""
        try:
            return abs(self._clock() - self._file.stat().st_mtime) < PATIENCE_S
        except OSError:
            return False

    @property
    def waits_for(self) -> str:
        """What has to come, while it is open."""
        problem = self._problem()
        return "it waits for a trainer" + (f" that can do it; one that looked cannot: {problem}" if problem else "")

    @property
    def given_up(self) -> str | None:
        """Why it was in vain; None: it is open, or there is none."""
        if not self.exists or self.is_open:
            return None
        problem = self._problem()
        why = f"; one that looked cannot: {problem}" if problem else ": see that one runs (gspo workers)"
        return f"no trainer has begun it for {PATIENCE_S / 60:.0f} minutes{why}"

    def ask(self) -> None:
        """Anew, where it was asked before. Raises OSError."""
        self._file.parent.mkdir(exist_ok=True)  # not the job's: it may have been removed
        self._file.write_text("")
        self.renew()

    def renew(self) -> None:
        """Whoever calls this is at it, or at another one first."""
        now = self._clock()
        with contextlib.suppress(OSError):  # it is given up too soon at worst
            os.utime(self._file, (now, now))

    def decline(self, problem: str) -> None:
        """Say why the caller cannot do it, for those who wait, where nobody has: another one may. It waits no longer
        for that."""
        with contextlib.suppress(OSError):
            asked_at = self._file.stat().st_mtime
            if self._problem():
                return
            try:
                with self._file.open("r+") as file:  # never makes one that was withdrawn meanwhile
                    file.write(problem[:MOST_CHARS])
            finally:  # a full disk has touched it all the same
                os.utime(self._file, (asked_at, asked_at))

    def withdraw(self) -> None:
        """Raises OSError."""
        self._file.unlink(missing_ok=True)

    def _problem(self) -> str:
        try:
            return self._file.read_text()
        except OSError:
            return ""


def requested_in(jobs: JobsDir) -> Iterator[tuple[JobDir, Position]]:
    """The exports of accepted jobs that were asked of a trainer. One folder is listed for each job that has exports."""
    for job in jobs.unopened():
        try:
            names = os.listdir(job.exports)
        except OSError:  # most jobs have none
            continue
        found = (parse_step_name(name.removeprefix(_REQUESTED)) for name in names if name.startswith(_REQUESTED))
        asked = [at for at in found if at is not None]
        if asked and job.accepted.is_file():
            yield from ((job, at) for at in sorted(asked))
