"""Loads one environment and forks a process for each request; watches their memory, reaps them, reports how they ended.

Rule: it runs no code of a session and starts no thread, so a fork is always safe; if importing the environment left
threads behind, its processes start over instead (``exec``). When its parent is gone it ends everything and itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

from environments.sandbox import door
from gspo_core import descendants, landlock
from gspo_core.env import AgentStart, Environment, InvalidEnvironment, load_environment
from gspo_core.outbound import guard_connections, parse_networks
from services.hosts import wire
from services.hosts.inside import limits as bounds
from services.hosts.inside.sessions import serve
from services.hosts.inside.traits import describe, hosting_of, require_sandboxes
from services.hosts.mark import Mark
from services.hosts.walls import filesystem, scratch

WATCH_S = 0.2
# Descriptors of one request to fork: the connection, the mark.
_NUM_DESCRIPTORS = 2


@dataclass
class _Child:
    number: int
    scratch: str
    base_bytes: int
    over_memory: bool = False


def run(control: int, parent: int) -> None:
    """The whole life of the process."""
    descendants.die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=control)
    order = _read_order(connection)
    loaded = _load(connection, order)
    if loaded is not None:
        if not order["is_walled"]:  # there it has nothing to clean up: its files go with it
            descendants.outlive_parent()
        descendants.adopt_orphans()
        lock = scratch.make(order["scratch"])
        scratch.sweep(Path(order["scratch"]).parent)
        ForkServer(connection, *loaded, order, lock).run()


def _read_order(connection: socket.socket) -> wire.Order:
    frames = wire.Frames()
    while data := connection.recv(1 << 16):
        for body in frames.feed(data):
            order: wire.Order = json.loads(body)
            return order
    sys.exit(1)


def _load(connection: socket.socket, order: wire.Order) -> tuple[Environment, wire.HostLimits] | None:
    try:
        environment, limits = _environment(order)
        connection.sendall(wire.encode({"ready": asdict(describe(environment, limits))}))
    except InvalidEnvironment as error:
        connection.sendall(wire.encode({"invalid": str(error)}))
    except (TypeError, ValueError) as error:
        connection.sendall(wire.encode({"invalid": f"{order['ref']}: cannot be described: {error}"}))
    else:
        return environment, limits
    return None


def _environment(order: wire.Order) -> tuple[Environment, wire.HostLimits]:
    if (networks := order["networks"]) is not None:
        guard_connections(parse_networks(networks))
    if (door_at := order["door"]) is not None:
        door.open_to(door_at)
    agent = order.get("agent")
    start = None if agent is None else AgentStart.from_json(agent)
    environment = load_environment(order["ref"], order["config"], agent=start)
    if door_at is not None:
        require_sandboxes(environment)
    return environment, hosting_of(environment, order["hosting"])


class ForkServer:
    """Serves one parent until its connection ends."""

    def __init__(
        self,
        connection: socket.socket,
        environment: Environment,
        limits: wire.HostLimits,
        order: wire.Order,
        lock: int,
    ) -> None:
        self._lock = lock
        self._connection = connection
        self._environment = environment
        self._limits = limits
        self._order = order
        self._frames = wire.Frames()
        self._descriptors: deque[int] = deque()
        self._children: dict[int, _Child] = {}
        self._may_fork = _num_threads() == 1
        self._started_by_import = descendants.children()

    def run(self) -> None:
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        gc.freeze()  # everything loaded by now stays shared with every child
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(WATCH_S if self._children else None)}
                if woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 1 << 12)
                self._reap()
                self._watch_memory()
                if self._connection.fileno() in ready and not self._read():
                    break
        self._end()

    def _read(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, 1 << 16, 16)
        except ConnectionError:
            return False
        self._descriptors += descriptors
        for body in self._frames.feed(data):
            request: wire.ForkCommand = json.loads(body)
            if "fork" in request:
                self._fork(request["fork"])
            elif "kill" in request:
                self._kill(request["kill"])
        return bool(data)

    def _fork(self, number: int) -> None:
        connection, mark = (self._descriptors.popleft() for _ in range(_NUM_DESCRIPTORS))
        folder = tempfile.mkdtemp(dir=self._order["scratch"])
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_child(server, folder, connection, mark)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
        with contextlib.suppress(OSError):  # the child does it too, whichever comes first
            os.setpgid(pid, pid)
        os.close(connection)
        os.close(mark)
        self._children[pid] = _Child(number, folder, bounds.resident_bytes(pid))
        self._report({"forked": number, "pid": pid})

    def _become_child(self, server: int, folder: str, connection: int, mark: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()
        os.close(self._lock)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if self._order["is_walled"]:
            landlock.confine(filesystem.seen_by(folder), may_listen=self._order["may_listen"])
        if self._may_fork:
            _serve(self._environment, self._limits, server, connection, mark)
            os._exit(0)
        order = tempfile.TemporaryFile()  # noqa: SIM115 - inherited by what replaces this process
        order.write(json.dumps(self._order).encode())
        order.seek(0)
        door_at = self._order["door"]
        for descriptor in (connection, mark, order.fileno(), *(() if door_at is None else (door_at,))):
            os.set_inheritable(descriptor, True)
        program = [sys.executable, "-m", "services.hosts.inside", "again"]
        os.execv(sys.executable, [*program, str(connection), str(mark), str(order.fileno())])  # noqa: S606

    def _kill(self, number: int) -> None:
        for pid, child in self._children.items():
            if child.number == number:
                bounds.kill_group(pid)

    def _watch_memory(self) -> None:
        most = self._limits.memory_mb << 20
        # Only behind a wall is /proc short enough to be read so often.
        is_walled, shared = self._order["is_walled"], bounds.shared_bytes(os.getpid()) if self._children else 0
        for pid, child in self._children.items():
            held = bounds.bytes_with_descendants(pid, shared) if is_walled else bounds.resident_bytes(pid)
            if held - child.base_bytes > most:
                child.over_memory = True
                bounds.kill_group(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue
            bounds.kill_group(pid)
            descendants.kill_strays(self._children.keys() | self._started_by_import)
            shutil.rmtree(child.scratch, ignore_errors=True)
            self._report({"ended": child.number, "how": _how(status, child)})

    def _report(self, event: wire.ForkEvent) -> None:
        with contextlib.suppress(OSError):  # the parent is gone: the next read says so
            self._connection.sendall(wire.encode(event))

    def _end(self) -> None:
        for pid in self._children:
            bounds.kill_group(pid)
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        descendants.kill_strays(())
        shutil.rmtree(self._order["scratch"], ignore_errors=True)


def _how(status: int, child: _Child) -> tuple[str, int]:
    """Over its memory, a signal, or an exit status."""
    if child.over_memory or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == bounds.OVER_MEMORY_STATUS):
        return "memory", 0
    if os.WIFSIGNALED(status):
        return "signal", os.WTERMSIG(status)
    return "exit", os.WEXITSTATUS(status)


def _serve(environment: Environment, limits: wire.HostLimits, server: int, connection: int, mark: int) -> None:
    with contextlib.suppress(PermissionError):
        os.setsid()
    descendants.die_with(server)
    descendants.adopt_orphans()
    bounds.bound(limits.memory_mb << 20, limits.file_mb << 20)
    random.seed()  # else every process of a host would draw the same numbers
    serve(environment, socket.socket(fileno=connection), Mark(mark), limits.memory_mb << 20)
    descendants.kill_strays({os.getpid()})


def serve_again(connection: int, mark: int, order: int) -> None:
    """A process of an environment whose import starts threads: it loads the environment itself."""
    server = os.getppid()
    with os.fdopen(order, "rb") as file:
        given: wire.Order = json.loads(file.read())
    environment, limits = _environment(given)
    _serve(environment, limits, server, connection, mark)


def _num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 1
