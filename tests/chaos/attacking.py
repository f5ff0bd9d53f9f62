"""What a hostile world of a chaos run tries, and what came of it, in a file that the oracle reads.

The rule kept here: the harm is real where nothing holds it back, and whoever tries writes down that it begins before it
does, since some end by it. Only the standard library: it runs behind the wall.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HOST = {
    "num_processes": 128,
    "memory_mb": 192,
    "disk_mb": 64,
    "file_mb": 16,
    "sessions_per_process": 1,
    "max_processes": 4,
}
"""What the job asks for of its hosts; each attack tries to get more."""
NUM_FORKS, NUM_HOGS, MB_EACH, NUM_FILES = 400, 16, 64, 32
HELD_WITHIN_S, SPINS_S = 5.0, 2.0
WATCHED_S = 1.0
"""Who holds too much for so long was not held back: watches look a few times a second."""
PIECE = bytes(4 << 20)
OUTPUT_BYTES = 8 << 20
SECRET = b"GSPO_REDIS_URL=redis"
AT_ONCE = 2
WALLED = "walled"
"""What a machine is called behind a wall."""


def attack(ledger: str, run: str, drawn: int) -> None:
    """Two of them, as ``drawn`` says, and then a daemon that stays. Unwalled it does nothing: it would harm all."""
    if socket.gethostname() != WALLED:
        raise PermissionError("this world attacks behind a wall only")
    names = sorted(ATTACKS)
    for name in [names[(drawn + place) % len(names)] for place in range(AT_ONCE)]:
        _note(ledger, run, name, "begun")
        try:
            got = ATTACKS[name]()
        except OSError as error:
            got, told = "", type(error).__name__
        else:
            told = "harm" if got else "bounded"
        _note(ledger, run, name, told, got)
    _leave_a_daemon()


def attacks_in(ledger: Path) -> Path:
    """Where it is written what was tried."""
    return ledger.with_name(f"attacks-{ledger.name}")


def _note(ledger: str, run: str, name: str, told: str, got: str = "") -> None:
    line = json.dumps({"run": run, "attack": name, "told": told, "got": got}) + "\n"
    file = os.open(attacks_in(Path(ledger)), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


# Each says what it got that it must not have; nothing where it was held back.


def fork_bomb() -> str:
    children: list[int] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(NUM_FORKS):
                children.append(_child(signal.pause))
    finally:
        _end(children)
    return f"{len(children)} processes" if len(children) == NUM_FORKS else ""


def fill_memory() -> str:
    """In many children at once, each within its bounds; who is not ended meanwhile has it all."""
    read, write = os.pipe()
    children: list[int] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(NUM_HOGS):
                children.append(_child(lambda: _hold(MB_EACH, write)))
        num_held, deadline = 0, time.monotonic() + HELD_WITHIN_S
        while num_held < NUM_HOGS and time.monotonic() < deadline:
            ready, _, _ = select.select([read], [], [], 0.1)
            num_held += len(os.read(read, NUM_HOGS)) if ready else 0
        if num_held == NUM_HOGS:
            time.sleep(WATCHED_S)
    finally:
        _end(children)
        os.close(read)
        os.close(write)
    return f"{num_held * MB_EACH} MiB" if num_held == NUM_HOGS else ""


def fill_disk() -> str:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_FILES):
            Path(folder, str(number)).write_bytes(PIECE)
        return f"{NUM_FILES * len(PIECE) >> 20} MiB"


def signal_others() -> str:
    """All that there are, by their numbers and at once."""
    reached = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(int(name), signal.SIGTERM)
                reached.append(name)
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)
    return f"signals to {', '.join(reached)}" if reached else ""


def read_others() -> str:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and SECRET in (entry / "environ").read_bytes():
                return f"the variables of process {entry.name}"
    return ""


def write_without_end() -> str:
    """To where the host's own output goes: nobody may have to wait for it, or keep it."""
    for descriptor in (1, 2):
        for _ in range(OUTPUT_BYTES >> 16):
            os.write(descriptor, bytes(1 << 16))
    return ""


ATTACKS: dict[str, Callable[[], str]] = {
    one.__name__: one for one in (fork_bomb, fill_memory, fill_disk, signal_others, read_others, write_without_end)
}


def _leave_a_daemon() -> None:
    """It has left its family and computes for a while."""
    with contextlib.suppress(OSError):
        if (between := os.fork()) == 0:
            with contextlib.suppress(OSError):
                os.setsid()
                if os.fork() == 0:
                    until = time.monotonic() + SPINS_S
                    while time.monotonic() < until:
                        sum(range(10_000))
            os._exit(0)
        os.waitpid(between, 0)


def _child(act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return pid


def _hold(mb: int, write: int) -> None:
    memory = mmap.mmap(-1, mb << 20)
    for place in range(0, mb << 20, mmap.PAGESIZE):
        memory[place] = 1
    os.write(write, b"x")
    signal.pause()


def _end(children: list[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
