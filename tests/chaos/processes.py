"""The processes of a run: born in the nursery, killed and stopped by pid, born again under the same name.

The rule kept here: only processes that were born here, and theirs, are signalled, and none of them outlives the run. A
process that ends without having been killed is noted in ``ends``, and born again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from examples.demo.memory import process_tree
from tests.chaos.absences import Absences

STREAM_LIMIT = 1 << 20
BIRTH_TIMEOUT_S = 120.0


@dataclass
class Process:
    """One place in the stack; ``pid`` is 0 while nobody holds it."""

    name: str
    service: str
    argv: list[str]
    env: dict[str, str]
    pid: int = 0
    born_at: float = 0.0
    """Unix seconds."""
    is_wanted: bool = True
    is_stopped: bool = False
    killed: set[int] = field(default_factory=set)
    asked: dict[int, float] = field(default_factory=dict)
    """Pids that were asked to leave, each with the time."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_up(self) -> bool:
        """Somebody holds it who runs, and was not killed a moment ago."""
        return self.pid > 0 and not self.is_stopped and self.pid not in self.killed


@dataclass(frozen=True)
class End:
    """Of a process that was not killed. All times are Unix seconds."""

    name: str
    pid: int
    status: int
    born: float
    asked: float | None
    """To leave; None: it ended by itself."""
    at: float
    is_late: bool = False
    """It did not leave in its time, and was killed then."""


class Nursery:
    def __init__(self, log_dir: Path, env: dict[str, str], absences: Absences) -> None:
        self._log_dir = log_dir
        self._absences = absences
        self._env = env
        self._child: asyncio.subprocess.Process | None = None
        self._births: dict[str, tuple[Process, asyncio.Future[None]]] = {}
        self._by_pid: dict[int, Process] = {}
        self._listening: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._reviving: set[asyncio.Task[None]] = set()
        self._count = 0
        self.processes: dict[str, Process] = {}
        self.ends: list[End] = []

    async def open(self) -> None:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with (self._log_dir / "nursery.log").open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.chaos.nursery"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._env},
                start_new_session=True,
                limit=STREAM_LIMIT,
            )
        self._listening = asyncio.create_task(self._listen(), name="nursery")
        async with asyncio.timeout(BIRTH_TIMEOUT_S):
            await self._ready.wait()

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def num_crashes(self) -> int:
        return sum(end.asked is None for end in self.ends)

    async def _listen(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        while line := await self._child.stdout.readline():
            self._hear(json.loads(line))

    def _hear(self, told: dict[str, Any]) -> None:
        if "ready" in told:
            self._ready.set()
        elif "born" in told:
            process, born = self._births.pop(told["born"])
            self._note_birth(process, told["pid"])  # at once: its death may stand in the next line
            if not born.done():
                born.set_result(None)
        else:
            self._note_death(told["died"], told["status"])

    def _note_birth(self, process: Process, pid: int) -> None:
        process.pid, process.born_at, process.is_stopped = pid, time.time(), False
        process.ended = asyncio.Event()
        self._by_pid[pid] = process

    async def start(self, name: str, service: str, argv: list[str], env: dict[str, str]) -> Process:
        process = Process(name, service, argv, env)
        self.processes[name] = process
        await self._give_birth(process)
        return process

    async def _give_birth(self, process: Process) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        self._count += 1
        number = f"{process.name}-{self._count}"
        born = asyncio.get_running_loop().create_future()
        self._births[number] = process, born
        order = {"id": number, "service": process.service, "argv": process.argv, "env": process.env}
        order["log"] = str(self._log_dir / process.name)
        self._child.stdin.write(json.dumps(order).encode() + b"\n")
        await born

    def _note_death(self, pid: int, status: int) -> None:
        process = self._by_pid.pop(pid, None)
        if process is None:
            return
        if process.pid == pid:
            process.pid = 0
        process.ended.set()
        self._absences.is_back(process.name, pid)
        asked = process.asked.get(pid)
        if asked is not None or pid not in process.killed:
            self.ends.append(End(process.name, pid, status, process.born_at, asked, time.time()))
        if process.is_wanted:
            task = asyncio.create_task(self._give_birth(process))
            self._reviving.add(task)
            task.add_done_callback(self._reviving.discard)

    async def revive(self, process: Process) -> None:
        """Who was killed while nobody wanted it."""
        process.is_wanted = True
        if process.pid:  # its death is not known yet, and brings it back
            return
        await self._give_birth(process)

    def kill(self, process: Process) -> None:
        self._signal(process, signal.SIGKILL)

    def kill_children(self, process: Process) -> bool:
        """What it has started itself, and not it; False: nothing."""
        children = process_tree(process.pid)[1:] if process.pid else []
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(children)

    def stop(self, process: Process) -> None:
        process.is_stopped = True
        self._absences.is_away(process.name, process.pid)
        self._signal(process, signal.SIGSTOP)

    def go_on(self, process: Process, pid: int) -> None:
        """``pid`` is who was stopped: it may have been killed meanwhile."""
        if process.pid == pid:
            process.is_stopped = False
            self._signal(process, signal.SIGCONT)
        self._absences.is_back(process.name, pid)

    def _signal(self, process: Process, number: signal.Signals) -> None:
        if process.pid:
            if number == signal.SIGKILL:
                process.killed.add(process.pid)
            if number == signal.SIGTERM:
                if process.pid in process.asked:
                    return  # a second one hurries who is leaving, and nobody who upgrades sends it
                process.asked[process.pid] = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    async def restart(self, process: Process, timeout_s: float) -> None:
        """Ask it to end in order; it is born again. Who does not end in time ends the run."""
        ended, pid = process.ended, process.pid
        self._signal(process, signal.SIGTERM)
        async with asyncio.timeout(timeout_s):
            await ended.wait()
            while process.pid in (0, pid):
                await asyncio.sleep(0.01)

    async def leave(self, process: Process, timeout_s: float) -> None:
        """Ask it to end in order; who does not is killed, and that is noted."""
        process.is_wanted = False
        if not process.pid:
            return
        ended, pid = process.ended, process.pid
        self._signal(process, signal.SIGCONT)
        self._signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            self._signal(process, signal.SIGKILL)
            await ended.wait()
            self.ends = [replace(end, is_late=True) if end.pid == pid else end for end in self.ends]

    async def close(self) -> None:
        for process in self.processes.values():
            process.is_wanted = False
            self._signal(process, signal.SIGKILL)
        if self._child is not None and self._child.returncode is None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            try:
                async with asyncio.timeout(10):
                    await self._child.wait()
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
        if self._listening is not None:
            await asyncio.gather(self._listening, return_exceptions=True)


def marked(mark: str) -> dict[int, str]:
    """Every living process whose environment holds ``mark``, with its command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes() and not is_gone(entry):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def is_gone(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def stamp(**record: Any) -> bytes:
    return json.dumps({"at": time.time(), **record}).encode()
