"""A host, seen from its user: a fork server that loads an environment, forks processes from it and ends them.

Rule: nothing of a host outlives its parent, and nothing of ours reaches it but its order: no settings, no keys. Behind
a wall it knows its processes by other numbers than we do: which of ours one is, is found out here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gspo_core.environment_contract import InvalidEnvironment
from gspo_core.json_value import JSON
from services.hosts import wire
from services.hosts.mark import Mark
from services.hosts.process import FROM_OUTSIDE, Cause, Death, HostProcess
from services.hosts.walls import scratch
from services.hosts.walls.control_groups import ControlGroup
from services.hosts.walls.plan import Shown
from services.hosts.walls.terms import SESSIONS
from services.hosts.walls.tiers import WALLS, Bounds, Program, Tier
from services.hosts.wire import HARD_MEMORY_FACTOR, BadFrame, HostDescription

if TYPE_CHECKING:
    from environments.sandbox.contract import Sandboxes
    from services.hosts.sandboxes.relay import Relay

ROOT = Path(__file__).resolve().parents[2]
# Everything that a host inherits: no settings, no keys, no addresses of ours.
PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TAIL_BYTES = 4096
# A server that is busy forking reads its requests a little later.
FULL_S = 0.02
# Between the end of a host's connection and that of the host.
ENDS_WITHIN_S = 1.0
SESSIONS_OUT_OF_MEMORY_SCORE = "900"


def outer_pid(entered: int, inner: int) -> int | None:
    """Among the children of the first process behind the wall that ``entered`` built; None if it is gone."""
    for first in children_of(entered):
        for pid in reversed(children_of(first)):  # the newest is asked for most often
            if _number_inside(pid) == inner:
                return pid
    return None


def children_of(pid: int) -> Sequence[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    return []


def _number_inside(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_bytes().split(b"\n"):  # the name of a process may hold all else
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return None


class _Event(msgspec.Struct):
    forked: int | None = None
    pid: int | None = None
    ended: int | None = None
    how: tuple[str, int] = ("signal", 9)


class _Loading(msgspec.Struct):
    """The first frame of a host: one of these."""

    ready: HostDescription | None = None
    invalid: str | None = None


_read_event = msgspec.json.Decoder(_Event).decode
_read_loading = msgspec.json.Decoder(_Loading).decode


@dataclass(frozen=True)
class HostOrder:
    """Which environment a host loads, and with what."""

    ref: str
    config: Mapping[str, JSON] = field(default_factory=dict)
    hosting: Mapping[str, int | str] = field(default_factory=dict)
    """Fields of ``HostLimits`` that the job sets."""
    python: str = sys.executable
    """The interpreter, e.g. of the environment's own virtual environment."""
    boot_timeout_s: float = 120.0
    hang_grace_s: float = 3.0
    """Beyond the deadline that a session keeps itself."""
    paths: Sequence[str] = ()
    """Where its modules are found, besides where our own are."""
    networks: Sequence[str] | None = None
    """It may connect to public addresses and to these networks only. None: to everything."""
    agent: Mapping[str, JSON] | None = None
    """How its agent is started, as the job says; None for an environment that is none."""
    is_upload: bool = False
    """Its code was uploaded to the API."""
    tier: Tier = Tier.PROCESS
    """The wall around it; `services.hosts.local` decides."""
    sandboxes: Sandboxes | None = None
    """Where what a policy runs is run; None: in the host itself."""
    bounds: Bounds = field(default_factory=Bounds)
    has_network: bool = False
    """Matters only in tiers that can withhold it."""
    readable: Sequence[str] = ()
    """Paths that it may read behind a wall, besides code."""
    writable: Sequence[str] = ()
    hidden: Sequence[str] = ()
    """Paths that it does not see, although they lie below some that it does."""

    @property
    def shown(self) -> Shown:
        """What it sees behind a wall."""
        files = [ref.rpartition(":")[0] for ref in (self.ref, str((self.agent or {}).get("reward") or ""))]
        code = [one for one in files if one.endswith(".py")]
        return Shown(
            self.python,
            code=(*_search_path(), *self.paths),
            files=code,
            readable=self.readable,
            writable=self.writable,
            hidden=self.hidden,
            network=self.has_network,
        )

    def frame(self) -> wire.Boot:
        """The part of it that a host is told."""
        networks = None if self.networks is None else list(self.networks)
        agent = None if self.agent is None else dict(self.agent)
        return wire.Boot(
            ref=self.ref, config=dict(self.config), hosting=dict(self.hosting), networks=networks, agent=agent
        )


class BootFailed(Exception):
    """The host did not come up, and the environment may or may not be to blame."""


class HostKilled(BootFailed):
    """It was killed from outside before it had come up: by a kernel that is short of memory, or by an operator."""


class RunningHost(asyncio.Protocol):
    """A running host. ``boot`` makes one."""

    def __init__(
        self,
        order: HostOrder,
        connection: socket.socket,
        process: subprocess.Popen[bytes],
        group: ControlGroup | None,
        relay: Relay | None = None,
    ) -> None:
        self._order = order
        self._process = process
        self._relay = relay
        self._group = group
        """What bounds all of it together, where the machine has such a thing."""
        self._base_bytes = self._most_processes = 0
        self._connection = connection
        self._raw = connection.dup()
        """Descriptors are sent past the transport, which cannot."""
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[HostDescription] = asyncio.get_running_loop().create_future()
        self._processes: dict[int, HostProcess] = {}
        self._pids: set[int] = set()
        self._next_number = 0
        self._output = _Output()
        self.scratch = str(scratch.new_path(SESSIONS if order.tier else None))
        """Its processes' temporary files: below it, so that they go even where the server cannot clean up. The server
        makes it, once it can outlive its worker: otherwise a worker killed meanwhile would leave it behind."""
        self.is_dead = False
        self.gone = asyncio.Event()
        self.description: HostDescription

    @classmethod
    async def boot(cls, order: HostOrder) -> RunningHost:
        """Raises ``InvalidEnvironment`` with the reason, ``BootFailed`` or ``HostKilled``."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        read_output, write_output = os.pipe()
        group = ControlGroup.make(order.bounds.num_processes) if order.tier else None
        relay = None if order.sandboxes is None else _door_to(order.sandboxes)
        try:
            process = _spawn(order, theirs, write_output, group, relay)
        except OSError as error:
            if relay is not None:
                relay.close()
            if group is not None:
                group.remove()
            ours.close()
            os.close(read_output)
            raise InvalidEnvironment(f"{order.ref}: its interpreter {order.python} does not start: {error}") from None
        finally:
            theirs.close()
            os.close(write_output)
        ours.setblocking(False)
        server = cls(order, ours, process, group, relay)
        try:
            async with asyncio.timeout(order.boot_timeout_s):
                await loop.connect_read_pipe(lambda: server._output, os.fdopen(read_output, "rb"))
                server._transport, _ = await loop.create_connection(lambda: server, sock=ours)
                server._transport.write(wire.encode({**order.frame(), **server._inside()}))
                server.description = await server._ready
                server._base_bytes = group.held_bytes() if group is not None else 0
        except TimeoutError:
            await server.close()
            raise BootFailed(f"{order.ref} was not loaded within {order.boot_timeout_s:g}s") from None
        except BootFailed as error:
            try:
                was_killed = await loop.run_in_executor(None, server._was_killed)
            finally:
                await server.close()
            if was_killed:
                raise HostKilled(f"{order.ref}: its host was killed while loading it") from error
            raise
        except BaseException:
            await server.close()
            raise
        return server

    def _inside(self) -> wire.Place:
        return {
            "scratch": self.scratch,
            "is_walled": bool(self._order.tier),
            "may_listen": not self._order.has_network,
            "door": None if self._relay is None else self._relay.number,
        }

    def _was_killed(self) -> bool:
        """Whether something outside ended it, once its connection has ended."""
        try:
            return -self._process.wait(ENDS_WITHIN_S) in FROM_OUTSIDE
        except subprocess.TimeoutExpired:
            return False

    async def fork(self) -> HostProcess:
        """A new process; it answers as soon as it has started."""
        self._next_number += 1
        ours, theirs = socket.socketpair()
        mark = Mark.new()
        process = HostProcess(self._next_number, Mark(mark), self._kill, self._order.hang_grace_s)
        self._processes[process.number] = process
        self._allow_memory()
        try:
            await self._send(wire.encode({"fork": process.number}), (theirs.fileno(), mark))
        except OSError as error:
            ours.close()
            self.is_dead = True  # known here before its connection says so
            raise BootFailed(f"the host does not answer: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(mark)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: process, sock=ours)
        return process

    def _allow_memory(self) -> None:
        """What its processes may hold, as many as there ever were at once, beside what was there before them."""
        if self._group is not None and len(self._processes) > self._most_processes:
            self._most_processes = len(self._processes)
            for_each = int(HARD_MEMORY_FACTOR * self.description.memory_mb)
            mb = self._order.bounds.disk_mb + self._most_processes * for_each
            self._group.allow_memory(self._base_bytes + (mb << 20))

    async def close(self) -> None:
        """Ends all of its processes and itself; waits until they are gone."""
        self._ready.cancel()
        for process in list(self._processes.values()):
            process.condemn(Death(Cause.CLOSED))
        if self._transport is not None:
            self._transport.close()
        self._connection.close()
        self._raw.close()
        loop = asyncio.get_running_loop()
        try:
            # Before it is ready it may hang in the environment's import and not notice that we have left.
            if not (self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None):
                self._process.kill()
            await loop.run_in_executor(None, self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
        self._output.close()
        self._kill_groups()
        if self._relay is not None:
            await loop.run_in_executor(None, self._relay.close)
            self._relay = None
        if self._group is not None:
            self._group.remove()
            self._group = None
        await loop.run_in_executor(None, self._remove_scratch)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> str:
        """The end of its output and that of its processes."""
        return self._output.tail.decode("utf-8", "replace").strip()

    # called by the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        return

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._hear(body)
        except (BadFrame, msgspec.DecodeError) as error:
            self._fail(BootFailed(f"{self._order.ref}: its host sent an unreadable frame: {error}"))

    def _hear(self, body: bytes) -> None:
        if not self._ready.done():
            said = _read_loading(body)
            if said.invalid is not None:
                self._fail(InvalidEnvironment(said.invalid))
            elif said.ready is not None:
                self._ready.set_result(said.ready)
            else:
                raise BadFrame("its first frame is neither ready nor invalid")
            return
        event = _read_event(body)
        if event.forked is not None and event.pid is not None:
            self._learn_pid(event.forked, event.pid)
        elif event.ended is not None:
            process = self._processes.pop(event.ended, None)
            if process is not None:
                self._pids.discard(process.pid or 0)
                process.ended.set_result(self._blamed(event.how))

    def _blamed(self, how: tuple[str, int]) -> tuple[str, int]:
        """The kernel's kill for taking too much of a group's memory looks like any other SIGKILL."""
        is_killed = how == ("signal", int(signal.SIGKILL))
        return ("memory", 0) if is_killed and self._group is not None and self._group.has_killed() else how

    def _learn_pid(self, number: int, pid: int) -> None:
        if self._order.tier:
            seen = outer_pid(self._process.pid, pid)
            _end_first(seen)
        else:
            seen = pid
            self._pids.add(pid)
        if number in self._processes:
            self._processes[number].pid = seen

    def connection_lost(self, error: Exception | None) -> None:
        self.is_dead = True
        self.gone.set()
        # At once: this process may be killed next, and would then leave it behind.
        asyncio.get_running_loop().run_in_executor(None, self._remove_scratch)
        self._fail(BootFailed(f"{self._order.ref}: its host exited while loading it: {self.tail or 'no output'}"))
        for process in list(self._processes.values()):
            if not process.ended.done():
                process.ended.set_result(("signal", int(signal.SIGKILL)))

    def _fail(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)

    async def _send(self, frame: bytes, descriptors: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(self._raw, [frame], descriptors)
            except BlockingIOError:
                await asyncio.sleep(FULL_S)
            else:
                return

    def _kill(self, number: int) -> None:
        try:
            self._raw.send(wire.encode({"kill": number}))
        except BlockingIOError:
            asyncio.get_running_loop().call_later(FULL_S, self._kill, number)
        except OSError:  # the server is gone, and took its processes along
            return

    def _remove_scratch(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _kill_groups(self) -> None:
        """Does what a killed server could no longer do."""
        for pid in (*self._pids, self._process.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._pids.clear()


class _Output(asyncio.Protocol):
    """Reads the host's output, so that the host never blocks on it, and keeps the end."""

    def __init__(self) -> None:
        self.tail = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-TAIL_BYTES:]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _end_first(pid: int | None) -> None:
    """Where memory is short, a process of sessions ends before that which forks all of them."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(SESSIONS_OUT_OF_MEMORY_SCORE, encoding="ascii")


def _door_to(sandboxes: Sandboxes) -> Relay:
    from services.hosts.sandboxes.relay import Relay  # most hosts run what a policy says themselves

    return Relay(sandboxes)


def _spawn(
    order: HostOrder, control: socket.socket, output: int, group: ControlGroup | None, relay: Relay | None
) -> subprocess.Popen[bytes]:
    parent = 0 if order.tier else os.getpid()  # behind a wall, outer processes have no number
    command = [order.python, "-m", "services.hosts.inside", str(control.fileno()), str(parent)]
    inherited = (control.fileno(),) if relay is None else (control.fileno(), relay.number)
    inside = Program(command, child_variables(order.paths), inherited)
    joins = [] if group is None else group.entries
    program = WALLS[order.tier].around(inside, order.shown, order.bounds, joins)
    process = subprocess.Popen(
        program.command,
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=program.variables,
        start_new_session=True,
    )
    if relay is not None:
        relay.theirs.close()  # so that the door closes with the last process of the host
    return process


def child_variables(paths: Sequence[str] = ()) -> dict[str, str]:
    """All environment variables of a process that runs code of an environment."""
    variables = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return variables | {"PYTHONPATH": os.pathsep.join([*_search_path(), *paths])}


def _search_path() -> Sequence[str]:
    """Where this process finds modules that are not part of its own interpreter."""
    own = set(sysconfig.get_paths().values())
    given = [str(Path(entry or ".").absolute()) for entry in sys.path]
    foreign = [entry for entry in given if entry not in own and not entry.endswith("lib-dynload")]
    return list(dict.fromkeys([str(ROOT), *(entry for entry in foreign if Path(entry).is_dir())]))
