"""The first rank's side of the others: sends them calls and interprets their answers.

Rule: all ranks make the same calls in the same order, so that the collectives inside match. One thread sends them all,
and a call is over when every rank has answered. If a rank diverges or is gone, or a collective computation fails,
nothing can be computed together any more: ``RanksLost``, and all processes must restart. A problem with the work
itself is a valid answer only if all ranks report it alike.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from services.files.data_dir import DataDir
from services.process.telemetry import get_logger
from services.trainer.ranks.calls import COMMANDS, Beat, End, Look, RankCall, Write, encode
from services.trainer.ranks.lines import COLLECTIVE_TIMEOUT_S, RankLine, RankProblem, is_of_the_lines
from services.trainer.telling.failure import RanksLost

T = TypeVar("T")
# Followers that hear nothing for ``PATIENCE_S`` consider the first rank lost.
BEAT_S = 10.0
PATIENCE_S = 3600.0
# Followers may still be in a collective that the first rank left with an error.
AFTER_FAILURE_S = 60.0


class ShareNotWritten(Exception):
    """A rank could not write its files; carries the message from its system."""


class Followers:
    """All ranks but the first. Call ``run`` and ``write`` from any thread."""

    def __init__(self, lines: Mapping[str, RankLine], *, beat_s: float = BEAT_S) -> None:
        self._lines = lines
        self._beat_s = beat_s
        self._calls: queue.SimpleQueue[tuple[RankCall, Callable[[], Any], bool, Future[Any]]] = queue.SimpleQueue()
        self._writing = {name: threading.Lock() for name in lines}
        self._lost: RanksLost | None = None
        self._has_ended = False
        # Not joined at exit: a hanging rank must not hold up the first one.
        self._thread = threading.Thread(target=self._serve, name="ranks", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RanksLost."""
        if self._lost is not None:
            raise self._lost

    def give_up(self, message: str) -> RanksLost:
        """Mark the ranks as lost; returns the exception that ``check`` raises from now on."""
        return self._lose(message)

    def run(self, call: RankCall, own: Callable[[], T], *, together: bool = True) -> T:
        """Run ``own`` here while the others execute ``call``; returns the result of ``own``.

        Unless ``together``, a failing rank leaves the others as they are, and its problem is raised here as a
        ValueError, or an OSError if its system reported it.
        """
        done: Future[T] = Future()
        self.check()
        self._calls.put((call, own, together, done))
        return done.result()

    def send(self, call: RankCall, own: Callable[[], None]) -> None:
        """Like ``run``, without waiting."""
        self._calls.put((call, own, True, Future()))

    def write(self, line: str, call: Write, own: Callable[[], None]) -> None:
        """All ranks write their files, concurrently with computation. Raises OSError, ShareNotWritten."""
        with self._writing[line]:
            self.check()
            try:
                self._lines[line].say(encode(call))
                own_error: Exception | None = None
                try:
                    own()
                except Exception as error:
                    own_error = error
                answers = self._lines[line].answers()
            except RuntimeError as error:
                raise self._lose(f"a rank is gone: {error}") from error
        if own_error is not None:
            raise own_error
        for rank, problem in answers.items():
            if problem is not None:
                message = f"rank {rank}: {problem.message}"
                raise ShareNotWritten(message) if problem.errno is None else OSError(problem.errno, message)

    def look(self, data_dir: DataDir) -> None:
        """Check that every rank sees the shared directory. Raises RanksLost."""
        witness = data_dir.witness()
        data_dir.path.mkdir(parents=True, exist_ok=True)
        witness.touch()
        try:
            self.run(Look(str(witness)), lambda: None)
        finally:
            witness.unlink()

    def end(self) -> None:
        """End the other ranks that are still there."""
        if self._has_ended or self._lost is not None:
            return
        with contextlib.suppress(RanksLost):
            self.run(End(), lambda: None)

    def _serve(self) -> None:
        while not self._has_ended:
            try:
                call, own, together, done = self._calls.get(timeout=self._beat_s)
            except queue.Empty:
                self._beat()
                continue
            try:
                done.set_result(self._do(call, own, together))
            except BaseException as error:  # re-raised where the result is awaited
                done.set_exception(error)

    def _beat(self) -> None:
        if self._lost is None:
            with contextlib.suppress(RanksLost):
                self._say(Beat())

    def _say(self, call: RankCall) -> None:
        self.check()
        try:
            for name in self._lines if isinstance(call, End) else [COMMANDS]:
                with self._writing[name]:
                    self._lines[name].say(encode(call))
        except RuntimeError as error:
            raise self._lose(f"a rank is gone: {error}") from error

    def _do(self, call: RankCall, own: Callable[[], T], together: bool) -> T:
        self._say(call)
        if isinstance(call, End):
            self._has_ended = True
            return own()
        failure: Exception | None = None
        try:
            result = own()
        except Exception as error:
            failure = error
        try:
            waits_in_vain = failure is not None and together
            answers = self._lines[COMMANDS].answers(AFTER_FAILURE_S if waits_in_vain else COLLECTIVE_TIMEOUT_S)
        except RuntimeError as error:
            raise self._lose(f"a rank is gone: {failure or error}") from (failure or error)
        problems = {rank: problem for rank, problem in answers.items() if problem is not None}
        is_alike = len(problems) == len(answers) and not any(one.is_of_the_lines for one in problems.values())
        if failure is not None and (not together or (is_alike and not is_of_the_lines(failure))):
            raise failure  # the same on all ranks, or harmless to them
        if failure is not None:
            first = f"rank 0 on {socket.gethostname()} failed: {failure}"
            raise self._lose(f"{_told(problems)}; {first}" if problems else first) from failure
        if problems and not together:
            numbers = [one.errno for one in problems.values() if one.errno is not None]
            raise OSError(numbers[0], _told(problems)) if numbers else ValueError(_told(problems))
        if problems:
            raise self._lose(_told(problems))
        return result

    def _lose(self, message: str) -> RanksLost:
        if self._lost is None:
            get_logger().error("ranks lost", message=message)
            self._lost = RanksLost(message)
        return self._lost


def _told(problems: Mapping[int, RankProblem]) -> str:
    return "; ".join(f"rank {rank}: {one.kind}: {one.message}" for rank, one in problems.items())
