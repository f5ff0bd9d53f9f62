"""An interpreter that has imported torch already: ``with WarmPython(folder) as warm`` puts a program at ``warm.path``
that may stand for ``sys.executable``.

A new process that trains spends five seconds of a core on imports before it does anything, and the API more than one.
What is asked of the program as ``-m MODULE`` or as a script is forked from a process that has them; all else, such as
``-c``, goes to the real interpreter. A forked process has the arguments, environment, folder and open files that were
given to the program, a session of its own, and its end is the program's end: signals are passed on, and who kills the
program kills it too.
Nothing but imports happens before a fork: no thread, no event loop, no random number.

What it does not have from the caller: limits, niceness and walls. How real processes begin is for other tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, NoReturn, Self

from services.process.children import die_with_launcher

# What is imported before the first fork. The learner imports the first two when it loads a model.
MODULES = (
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.conversion_mapping",
    "services.trainer.attempt",
    "services.engine.app",
    "gspo_core.replay.replaying",
    "gspo_core.cli",
)
# All that these import, but not they themselves: they are run.
MAINS = (
    "services.api.__main__",
    "services.gateway.__main__",
    "services.rollout.__main__",
    "services.trainer.__main__",
    "tests.chaos.engine",
)
# What they start in turn has walls of its own or needs no torch: it gets the real interpreter.
STARTING_COLD = ("services.api", "services.gateway", "services.rollout")
REAL = sys.executable
# The variable that names the file in which the program says what process it stands for.
TOLD = "WARM_PYTHON_TOLD"
_MAX_MESSAGE = 1 << 17
_MAX_FILES = 64

# The program: it has to start in a hundredth of a second, so it imports little and none of ours.
PROGRAM = """#!{python} -IS
import os, sys
words, python = sys.argv[1:], {python!r}
flags = 0
while flags < len(words) and words[flags] in ("-P", "-u", "-W"):
    flags += 1 + (words[flags] == "-W")
rest = words[flags:]
if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
    os.execv(python, [python, *words])
import array, json, signal, socket
files = [int(name) for name in os.listdir("/proc/self/fd")]
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
files = [fd for fd in files if fd < 3 or fd != line.fileno() and os.path.exists(f"/proc/self/fd/{{fd}}")]
passed = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2
line.connect({address!r})
signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # the order goes first
for one in passed:
    signal.signal(one, lambda number, frame: line.send(str(int(number)).encode()))
order = {{"words": rest, "flags": words[:flags], "cwd": os.getcwd()}}
told = os.environ.pop({told!r}, None)
order |= {{"environment": dict(os.environ), "files": files}}
line.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
pid = line.recv(64)
if told:
    with open(told + "-", "wb") as file:
        file.write(pid)
    os.rename(told + "-", told)
status = int(line.recv(64) or b"70")
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status in passed else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@dataclass(frozen=True)
class Forked:
    """A process that ends when this is gone."""

    pid: int
    line: socket.socket

    def wait(self) -> int:
        with self.line:
            return int(self.line.recv(64) or b"70")


class WarmPython:
    """The program and the process behind it, as long as anybody has it open.

    Who is given the same folder shares the process, which is begun by the first who asks for the program.
    """

    opened: ClassVar[list[WarmPython]] = []

    def __init__(self, folder: Path) -> None:
        self._program = folder / "python"
        self._address = folder / "orders"
        self._users = folder / "users"
        self._spent = spent_in(folder, os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._used: int | None = None
        self._beginning = threading.Lock()
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self.opened.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.leave()
        if self._process is not None:
            self._process.wait()
        self.opened.remove(self)

    def leave(self) -> None:
        """Others may have it open as yet: who began the process waits for them when this is closed."""
        if self._used is not None:
            os.close(self._used)
        self._used = None

    @property
    def path(self) -> Path:
        """The program. What imports is started when this is asked for, since many a session never does."""
        with self._beginning:
            if self._used is None:
                self._used = self._use()
        return self._program

    def _use(self) -> int:
        """What keeps the process alive: it ends when all who write to this pipe are gone, however they ended."""
        with alone(self._address):
            if self._address.exists():
                with contextlib.suppress(OSError):  # nobody reads: it was killed
                    return os.open(self._users, os.O_WRONLY | os.O_NONBLOCK)
            for left in (self._address, self._users):
                left.unlink(missing_ok=True)
            os.mkfifo(self._users)
            reader = os.open(self._users, os.O_RDONLY | os.O_NONBLOCK)
            used = os.open(self._users, os.O_WRONLY)
            try:
                self._process = self._begin(reader)
            except BaseException:
                os.close(used)
                raise
            finally:
                os.close(reader)
            return used

    def _begin(self, users: int) -> subprocess.Popen[bytes]:
        self._program.write_text(PROGRAM.format(python=sys.executable, address=str(self._address), told=TOLD))
        self._program.chmod(0o755)
        # torch decides while it is imported how many threads it has
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", __name__, str(self._address), str(self._program)]
        process = subprocess.Popen(argv, stdin=users, stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        try:
            with process.stdout as ready:
                assert ready.read(1) == b"!", "the imports failed"
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def start(self, words: Sequence[str], stdin: int, stdout: int, stderr: int) -> Forked:
        """As the program does, for who has to know the process itself."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert self.path
        line.connect(str(self._address))
        order = {
            "words": words,
            "flags": ["-P"],
            "cwd": os.getcwd(),
            "environment": dict(os.environ),
            "files": [0, 1, 2],
        }
        socket.send_fds(line, [json.dumps(order).encode()], [stdin, stdout, stderr])
        return Forked(int(line.recv(64)), line)

    def new_name(self) -> Path:
        """Of a file that is not there yet."""
        return self._address.with_name(f"told-{os.getpid()}-{next(self._numbers)}")

    def spent_s(self) -> float:
        """Processor time of what was forked and has ended: nobody here waits for it until this is closed."""
        return sum(map(float, self._spent.read_text().split())) if self._spent.exists() else 0.0


class Child(subprocess.Popen[bytes]):
    """``python -m MODULE`` by the program, or by our interpreter where there is none.

    The program cannot pass on a SIGKILL: this one goes to what it stands for, and it ends when that is gone.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        python: str | None = None,
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | IO[bytes] | None = None,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        self._told = WarmPython.opened[0].new_name() if WarmPython.opened and python is None else None
        environment = dict(env) if self._told is None else {**env, TOLD: str(self._told)}
        super().__init__(
            [python or program(), *words], env=environment, stdout=stdout, stderr=stderr, preexec_fn=preexec_fn
        )

    def send_signal(self, sig: int) -> None:
        if sig != signal.SIGKILL or self._told is None:
            return super().send_signal(sig)
        while self.poll() is None and not self._told.exists():
            time.sleep(0.002)
        if self.poll() is None and (pid := self._told.read_text()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), sig)


def spent_in(folder: Path, environment: Mapping[str, str]) -> Path:
    """Where it is noted what a user's processes took."""
    return folder / f"spent-{environment.get('PYTEST_XDIST_WORKER', 'main')}"


def program() -> str:
    """The one of this session, to start what does not depend on how it begins; our interpreter where there is none."""
    return str(WarmPython.opened[0].path) if WarmPython.opened else sys.executable


@contextlib.contextmanager
def alone(address: Path) -> Iterator[None]:
    """Nobody else begins the process, joins it or ends it."""
    with address.with_name("beginning").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_left(address: Path, users: int) -> bool:
    """Nobody writes to the pipe any more; then none can come, but to a process that is begun anew."""
    with alone(address):
        try:
            os.read(users, 1)
        except BlockingIOError:
            return False
        address.unlink()
        return True


def serve(listener: socket.socket) -> None:
    """Fork whatever is asked for, until all users have left."""
    signal.signal(signal.SIGCHLD, _bury)
    while True:
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if listener.fileno() not in ready:
            if is_left(Path(listener.getsockname()), 0):
                return
            continue
        line, _ = listener.accept()
        if os.fork() == 0:
            address = listener.getsockname()
            listener.close()
            keep(line, Path(address).parent)
        line.close()


def _bury(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def keep(line: socket.socket, folder: Path) -> NoReturn:
    """Be the parent of one process: pass on signals, say how it ended, and let it not outlive who asked for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, _, _ = socket.recv_fds(line, _MAX_MESSAGE, _MAX_FILES)
    if not message:
        os._exit(0)
    order = json.loads(message)
    pid = os.fork()
    if pid == 0:
        line.detach()
        become(order, files)
    for fd in (0, 1, 2, *files):
        os.close(fd)
    with contextlib.suppress(OSError):
        line.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    while ended not in select.select([ended, line.fileno()], [], [])[0]:
        number = line.recv(16)
        if not number:  # it was killed
            with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            break
        os.kill(pid, int(number))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with contextlib.suppress(OSError), spent_in(folder, order["environment"]).open("a") as file:
        file.write(f"{used.ru_utime + used.ru_stime}\n")
    with contextlib.suppress(OSError):
        line.send(str(status).encode())
    os._exit(0)


def become(order: dict[str, Any], files: list[int]) -> NoReturn:
    words, flags, code = order["words"], order["flags"], 70
    try:
        os.setsid()  # so a signal to the group of who asked does not reach it; the end of its parent does
        die_with_launcher()
        _take(order, files)
        if "-W" in flags:
            warnings.simplefilter(flags[flags.index("-W") + 1])
        if "-u" in flags:
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        sys.executable = interpreter_for(words, sys.executable)
        if words[0] == "-m":
            if "-P" not in flags:
                sys.path.insert(0, os.getcwd())
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = _code_of(error)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        _leave(code)


def interpreter_for(words: Sequence[str], warm: str) -> str:
    """What they start in turn, if it is Python."""
    return REAL if words[0] == "-m" and words[1] in STARTING_COLD else warm


def _code_of(error: SystemExit) -> int:
    if isinstance(error.code, int | None):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """As the interpreter does it: threads are waited for, what was registered is run, what is held back is written."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _take(order: dict[str, Any], files: list[int]) -> None:
    """The environment, the folder and the open files, under the numbers that they had."""
    numbers: list[int] = order["files"]
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    spare = max([*numbers, *files]) + 1
    held = [os.dup2(fd, spare + index) for index, fd in enumerate(files)]
    for target, fd in zip(numbers, held, strict=True):
        os.dup2(fd, target)
    kept = set(numbers)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def import_all() -> None:
    for name in (*MODULES, *MAINS):
        importlib.import_module(name)


def main(address: str, program: str) -> None:
    import_all()
    for name in MAINS:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # a collection in a child would copy what is shared
    sys.executable = program  # what they start is warm too
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"!")
    os.dup2(2, 1)
    serve(listener)


if __name__ == "__main__":
    main(*sys.argv[1:])
