"""The program between an environment and one command: it shows it little, ends it in time, and leaves nothing of it.

Rule: a command is over when the process that it began with is, or its deadline; whatever it has started ends with it,
daemons too. Of its output the beginning and the end are kept. It needs nothing but Python and this tree, and is started
by ``command``, never by hand.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, TypedDict

from gspo_core import descendants, landlock

_CHUNK = 1 << 16
_NOT_STARTED = 127
_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_MOST_CAPABILITIES = 64


class CommandOrder(TypedDict):
    """Everything that is decided about a command."""

    program: list[str]
    directory: str
    variables: dict[str, str]
    readable: list[str]
    writable: list[str]
    timeout_s: float
    most_bytes: int


class Report(TypedDict):
    """How it ended. ``status`` is that of the shell: 128 and more are signals."""

    status: int
    timed_out: bool
    seconds: float
    head: str
    tail: str
    left_out_bytes: int
    refusal: str
    """Why it could not be started; the machine's fault, not the command's."""


def main() -> None:
    descendants.be_told_of_parents_end()
    signal.signal(signal.SIGTERM, _leave)
    descendants.adopt_orphans()
    order: CommandOrder = json.loads(sys.stdin.buffer.read())
    sys.stdout.write(json.dumps(run(order)))


def run(order: CommandOrder) -> Report:
    output, said = os.pipe()
    refusals, refused = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(order, said, refused)
    os.close(said)
    os.close(refused)
    kept = KeptOutput(order["most_bytes"])
    try:
        ended_in_time = _watch(child, output, kept, began + order["timeout_s"])
        seconds = time.monotonic() - began
        status = _end_all(child)
        while data := os.read(output, _CHUNK):  # no writer is left
            kept.add(data)
        refusal = os.read(refusals, _CHUNK).decode(errors="replace")
    finally:
        _end_all(child)
    head, tail, left_out_bytes = kept.shown()
    return Report(
        status=status,
        timed_out=not ended_in_time,
        seconds=seconds,
        head=head,
        tail=tail,
        left_out_bytes=left_out_bytes,
        refusal=refusal,
    )


def _leave(number: int, frame: object) -> NoReturn:
    """The caller of the command is gone."""
    sys.exit(1)


def _become(order: CommandOrder, output: int, refused: int) -> NoReturn:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and its children would
        os.setsid()
        for number, descriptor in enumerate((os.open("/dev/null", os.O_RDONLY), output, output)):
            os.dup2(descriptor, number)
        os.umask(0o022)
        os.chdir(order["directory"])
        drop_capabilities()
        landlock.confine(order["writable"], may_listen=True, read_only=order["readable"])
        os.execve(order["program"][0], order["program"], order["variables"])  # noqa: S606
    except OSError as error:
        os.write(refused, str(error).encode())
    finally:
        os._exit(_NOT_STARTED)


def drop_capabilities() -> None:
    """Takes from root the exceptions that the kernel makes for it, such as reading every process's environment."""
    libc = ctypes.CDLL(None, use_errno=True)
    for one in range(_MOST_CAPABILITIES if os.geteuid() == 0 else 0):
        if libc.prctl(_PR_CAPBSET_READ, one, 0, 0, 0) == 1 and libc.prctl(_PR_CAPBSET_DROP, one, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "root's capabilities cannot be given up")


def _watch(child: int, output: int, kept: KeptOutput, deadline: float) -> bool:
    """Reads what it says until it ends; false if its time was over before."""
    ended = os.pidfd_open(child)
    waiting = [ended, output]
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(waiting, [], [], left_s)
            if output in ready:
                if data := os.read(output, _CHUNK):
                    kept.add(data)
                else:
                    waiting.remove(output)
            if ended in ready:
                return True
        return False
    finally:
        os.close(ended)


def _end_all(first: int) -> int:
    """Kills whatever came from this process, and says how ``first`` ended."""
    status = 0
    while True:
        for pid in _below(os.getpid()):
            _kill(pid)
        try:
            pid, how = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == first:
            code = os.waitstatus_to_exitcode(how)
            status = code if code >= 0 else 128 - code


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _below(root: int) -> Sequence[int]:
    """All that come from ``root``, children before theirs."""
    parents = descendants.parents()
    found, last = [root], 0
    while last < len(found):
        found += [pid for pid, parent in parents.items() if parent == found[last]]
        last += 1
    return found[1:]


class KeptOutput:
    """The beginning and the end of an output that may be endless."""

    def __init__(self, most_bytes: int) -> None:
        self._half = most_bytes // 2
        self._head, self._tail, self._num_bytes = b"", b"", 0

    def add(self, data: bytes) -> None:
        self._num_bytes += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self._half :]

    def shown(self) -> tuple[str, str, int]:
        left_out = self._num_bytes - len(self._head) - len(self._tail)
        if not left_out:
            return (self._head + self._tail).decode(errors="replace"), "", 0
        return self._head.decode(errors="replace"), self._tail.decode(errors="replace"), left_out

    def text(self) -> str:
        return joined(*self.shown())


def joined(head: str, tail: str, left_out_bytes: int) -> str:
    middle = f"\n... {left_out_bytes} bytes left out ...\n" if left_out_bytes else ""
    return head + middle + tail
