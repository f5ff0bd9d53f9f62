"""Questions about trained steps that were asked of the API, and their answers: ``replays/`` in a job's directory.

The rule: a question is written down before it is worked on and an answer appears whole, so both outlive the process
that works. A process that works on a question holds a lock on its file, which ends with the process: a question without
answer and without holder was interrupted. Of a job the newest answers are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gspo_core.json_value import JSON
from gspo_core.log.records import DamagedRecord, decode_record, encode_record
from services.files.durable import make_directory, write_once
from services.files.job_dir import JobDir

# Format of an answer. Another number counts as no answer: the question can be asked again.
FORMAT = 1
# An answer with every token of an episode takes up to megabytes.
MOST_KEPT = 100
_ANSWER = ".answer.json"
_QUESTION = ".json"


@dataclass(frozen=True)
class AskedReplay:
    """A question, with its answer if there is one."""

    id: str
    asked: Mapping[str, Any]
    answered: Mapping[str, Any] | None
    """None: not yet."""


def replay_id(question: Mapping[str, JSON], past: Mapping[str, JSON]) -> str:
    """The same question about the same past has the same name."""
    text = json.dumps([question, past], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Replays:
    """Questions about one job, and their answers. Blocking: call it in a thread."""

    def __init__(self, job: JobDir) -> None:
        self._folder = job.replays

    def ask(self, name: str, asked: Mapping[str, JSON]) -> None:
        """Write a question down; one that is there stays."""
        make_directory(self._folder)
        with contextlib.suppress(FileExistsError):
            write_once(self._question(name), (encode_record(asked),))
        self._remove_old(name)

    def answer(self, name: str, answered: Mapping[str, JSON]) -> None:
        """For the holder of the question; a question that was removed meanwhile gets no answer."""
        if self._question(name).is_file():
            self.forget_answer(name)
            with contextlib.suppress(FileExistsError):
                write_once(self._folder / f"{name}{_ANSWER}", (encode_record({**answered, "format": FORMAT}),))

    def read(self, name: str) -> AskedReplay | None:
        asked = _read(self._question(name))
        answered = _read(self._folder / f"{name}{_ANSWER}")
        is_ours = answered is not None and answered.get("format") == FORMAT
        return None if asked is None else AskedReplay(name, asked, answered if is_ours else None)

    def names(self) -> list[str]:
        """Those of all questions, the newest first."""
        times: dict[str, int] = {}
        for path in self._folder.glob(f"*{_QUESTION}"):
            if not path.name.endswith(_ANSWER) and not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    times[path.name.removesuffix(_QUESTION)] = path.stat().st_mtime_ns
        return sorted(times, key=lambda name: (-times[name], name))

    def remove(self, name: str) -> None:
        # In this order: an answer without its question is never found.
        self._question(name).unlink(missing_ok=True)
        (self._folder / f"{name}{_ANSWER}").unlink(missing_ok=True)

    def forget_answer(self, name: str) -> None:
        """It is to be worked on again."""
        (self._folder / f"{name}{_ANSWER}").unlink(missing_ok=True)

    def remove_shown(self) -> None:
        """Those that were asked to show the tokens of an episode."""
        for name in self.names():
            found = self.read(name)
            if found is None or found.asked.get("question", {}).get("single") is not None:
                self.remove(name)

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Whether this process is the one that works on the question, until the block ends."""
        try:
            file = self._question(name).open("rb")
        except FileNotFoundError:
            yield False
            return
        with file:
            yield _lock(file)

    def is_held(self, name: str) -> bool:
        """Whether some process works on it."""
        try:
            with self._question(name).open("rb") as file:
                return not _has_no_holder(file)
        except FileNotFoundError:
            return False

    def _question(self, name: str) -> Path:
        return self._folder / f"{name}{_QUESTION}"

    def _remove_old(self, newest: str) -> None:
        old = [name for name in self.names() if name != newest][MOST_KEPT - 1 :]
        for name in old:
            if not self.is_held(name):
                self.remove(name)


def _lock(file: BinaryIO) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not _has_no_holder(file):
                return False
            # Another process was just testing whether it is held.


def _has_no_holder(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """None: it is not there, or was changed since it was written."""
    try:
        return decode_record(path.read_bytes())
    except (FileNotFoundError, DamagedRecord):
        return None
