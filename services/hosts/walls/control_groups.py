"""Control groups of the kernel: what a host, and all hosts of this machine together, take of memory, processes and
processors.

Rule: the process that starts a host makes its group and removes it; making a group also removes those whose makers are
gone. A machine that gives us no groups, or not all, is no reason to refuse anything: we use those it gives, and say so
(``offer``); the limits of processes (`inside.limits`) hold everywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ALL = "gspo-environments"
"""The group of all hosts; theirs lie in it."""
PREFIX = "host-"
MEMORY, PROCESSES, PROCESSORS = "memory", "pids", "cpu"
_WORDS = {MEMORY: "memory", PROCESSES: "processes", PROCESSORS: "processors"}
MEMORY_SHARE = 0.75
"""The machine's share for all hosts: the services' part stays free, whatever environments do."""
# A host is held back only where others want the processor. In version 1 a host weighs as one thread of a service,
# whatever it starts; in version 2, where all services are one group of 100, all hosts together weigh half of that.
_SHARES, _MOST_SHARES, _WEIGHT = 1024, 1 << 18, 50


@dataclass(frozen=True)
class _Files:
    """What a version calls its bounds."""

    memory: str
    swap: tuple[str, str]
    """Which file to write, and what, so that memory that is bounded is not merely moved to a disk."""
    held: str
    killed: str
    processors: str


_VERSIONS: Mapping[int, _Files] = {
    1: _Files(
        "memory.limit_in_bytes",
        ("memory.swappiness", "0"),
        "memory.usage_in_bytes",
        "memory.oom_control",
        "cpu.shares",
    ),
    2: _Files("memory.max", ("memory.swap.max", "0"), "memory.current", "memory.events", "cpu.weight"),
}
_PROCESSES_FILE = "pids.max"
_JOIN = "import sys; open(sys.argv[1], 'w').write('0')"
_TRY_S = 30.0


@dataclass(frozen=True)
class ControlGroupPlace:
    """Where groups can be made."""

    version: int
    folders: Mapping[str, Path]
    """By controller; in version 2 they are the same."""
    refused: str = ""
    """Why others cannot be had."""

    @property
    def distinct(self) -> Sequence[Path]:
        return list(dict.fromkeys(self.folders.values()))

    @property
    def files(self) -> _Files:
        return _VERSIONS[self.version]


class ControlGroup:
    """Holds one host. ``make`` makes it."""

    def __init__(self, place: ControlGroupPlace, name: str, lock: int) -> None:
        self._place = place
        self._name = name
        self._lock = lock
        """While it is held, the group is not swept."""
        self._num_told = 0

    @classmethod
    def make(cls, num_processes: int) -> ControlGroup | None:
        """None where this machine gives none."""
        place = _place()
        if not place.folders:
            return None
        try:
            _make_common(place)
            sweep(place)
            group = cls(place, *_claimed(place))
        except OSError:  # the rights were taken away since we looked
            return None
        group._write(PROCESSES, _PROCESSES_FILE, str(num_processes))
        _weigh(place)
        return group

    @property
    def entries(self) -> list[str]:
        """A process joins the group by writing 0 to these files."""
        return [str(folder / ALL / self._name / "cgroup.procs") for folder in self._place.distinct]

    def held_bytes(self) -> int:
        """Memory in use, cached files included; 0 if unknown."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int((self._folder(MEMORY) / self._place.files.held).read_text())
        return 0

    def allow_memory(self, num_bytes: int) -> None:
        self._write(MEMORY, self._place.files.memory, str(num_bytes))

    def has_killed(self) -> bool:
        """Whether the kernel has ended a process of it for its memory since this was last asked."""
        with contextlib.suppress(OSError, KeyError):
            lines = (self._folder(MEMORY) / self._place.files.killed).read_text().splitlines()
            counted = {name: int(count) for name, count in (line.split() for line in lines)}.get("oom_kill", 0)
            before, self._num_told = self._num_told, counted
            return counted > before
        return False

    def remove(self) -> None:
        """Once its processes are gone; where some are not, the next maker does it."""
        for folder in self._place.distinct:
            with contextlib.suppress(OSError):
                os.rmdir(folder / ALL / self._name)
        os.close(self._lock)
        _weigh(self._place)

    def _folder(self, controller: str) -> Path:
        return self._place.folders[controller] / ALL / self._name

    def _write(self, controller: str, file: str, text: str) -> None:
        if controller in self._place.folders:
            with contextlib.suppress(OSError):  # its bound is one of several
                (self._folder(controller) / file).write_text(text)


def offer() -> tuple[str, str]:
    """What this machine bounds by groups, in words, and why it does not bound more: either may be empty."""
    place = _place()
    if not place.folders:
        return "", place.refused
    held = ", ".join(word for controller, word in _WORDS.items() if controller in place.folders)
    return f"{held} (version {place.version})", place.refused


def sweep(place: ControlGroupPlace) -> None:
    """Removes groups that are not held; the kernel keeps those with processes in them."""
    first, *_ = place.distinct
    for folder in (first / ALL).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # held, or gone meanwhile
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for one in (*place.distinct[1:], first):
                    with contextlib.suppress(OSError):
                        os.rmdir(one / ALL / folder.name)
            finally:
                os.close(lock)


def _claimed(place: ControlGroupPlace) -> tuple[str, int]:
    """The name of a new group, and the lock that keeps it."""
    first, *others = place.distinct
    while True:
        name = f"{PREFIX}{uuid.uuid4().hex}"
        os.mkdir(first / ALL / name)
        try:
            lock = os.open(first / ALL / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # swept before it was opened
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (first / ALL / name).exists():
            break
        os.close(lock)  # swept before it was locked
    try:
        for folder in others:
            os.mkdir(folder / ALL / name)
    except OSError:
        os.close(lock)
        raise
    return name, lock


def _make_common(place: ControlGroupPlace) -> None:
    """The group of all hosts, with its bounds. Raises ``OSError``."""
    for folder in place.distinct:
        (folder / ALL).mkdir(exist_ok=True)
    if place.version == 2:
        _enable(place.distinct[0] / ALL, place.folders)
    if MEMORY in place.folders:
        for name, text in ((place.files.memory, str(int(MEMORY_SHARE * _memory_bytes(place)))), place.files.swap):
            with contextlib.suppress(OSError):  # a kernel without swap
                (place.folders[MEMORY] / ALL / name).write_text(text)


def _memory_bytes(place: ControlGroupPlace) -> int:
    """The machine's, or that of this process's group if it has less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max", or the root, which has no bound
        return min(machine, int((place.folders[MEMORY] / place.files.memory).read_text()))
    return machine


def _weigh(place: ControlGroupPlace) -> None:
    """The share of all hosts, of as many as there are now."""
    if PROCESSORS in place.folders:
        common = place.folders[PROCESSORS] / ALL
        with contextlib.suppress(OSError):
            num_hosts = sum(1 for _ in common.glob(f"{PREFIX}*"))
            shares = min(_MOST_SHARES, _SHARES * max(1, num_hosts))
            (common / place.files.processors).write_text(str(shares if place.version == 1 else _WEIGHT))


# Finding them


@cache
def _place() -> ControlGroupPlace:
    if sys.platform != "linux":
        return ControlGroupPlace(2, {}, "control groups need Linux")
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return ControlGroupPlace(2, {}, str(error))
    own = own_folders(mounts, groups)
    return _first_version(own) if any(name in own for name in _WORDS) else _second_version(own.get(""))


def own_folders(mounts: str, groups: str) -> dict[str, Path]:
    """By controller, the folder of the group that this process is in; that of version 2 under an empty name."""
    paths = {
        controller: path
        for _, controllers, path in (line.split(":", 2) for line in groups.splitlines())
        for controller in controllers.split(",")
    }
    found = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, point, *_ = before.split()
        kind, _, options = after.split()[:3]
        names = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        for name in names:
            if name in paths and (inside := _below(paths[name], root)) is not None:
                found[name] = Path(point) / inside
    return found


def _below(path: str, root: str) -> str | None:
    """As seen from a mount of ``root``; None if it is not to be seen there."""
    if root == "/" or path == root or path.startswith(f"{root}/"):
        return path.removeprefix(root).lstrip("/")
    return None


def _first_version(own: Mapping[str, Path]) -> ControlGroupPlace:
    """Each controller has folders of its own, and those that can be had are."""
    folders, refused = {}, []
    for name in _WORDS:
        try:
            _try(own[name])
            folders[name] = own[name]
        except KeyError:
            refused.append(f"{_WORDS[name]}: not mounted")
        except (OSError, subprocess.TimeoutExpired) as error:
            refused.append(f"{_WORDS[name]}: {error}")
    return ControlGroupPlace(1, folders, "; ".join(refused))


def _second_version(own: Path | None) -> ControlGroupPlace:
    """Below the own group, which the kernel allows where no process is in it (or it is the root), or beside it."""
    if own is None:
        return ControlGroupPlace(2, {}, "no file system of control groups is mounted")
    refused = ""
    for base in (own, own.parent):
        try:
            offered = (base / "cgroup.controllers").read_text().split()
            names = [name for name in _WORDS if name in offered]
            if not names:
                refused = refused or f"{base} has no controller that we could use"
                continue
            _enable(base, names)
            _try(base, names)
            return ControlGroupPlace(2, dict.fromkeys(names, base), "")
        except (OSError, subprocess.TimeoutExpired) as error:
            refused = refused or str(error)
    return ControlGroupPlace(2, {}, refused)


def _try(base: Path, controllers: Iterable[str] = ()) -> None:
    """Makes the common group, and one in it that a process may join. Raises ``OSError``."""
    (base / ALL).mkdir(exist_ok=True)
    _enable(base / ALL, controllers)
    with _made(base / ALL / f"try-{uuid.uuid4().hex}") as tried:
        joining = [sys.executable, "-I", "-S", "-c", _JOIN, str(tried / "cgroup.procs")]
        done = subprocess.run(joining, env={}, stderr=subprocess.PIPE, text=True, timeout=_TRY_S, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip().rpartition("\n")[2])


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    try:
        yield folder
    finally:
        os.rmdir(folder)


def _enable(folder: Path, controllers: Iterable[str]) -> None:
    """For the groups in it; version 2 only."""
    control = folder / "cgroup.subtree_control"
    if missing := set(controllers) - set(control.read_text().split() if control.exists() else controllers):
        control.write_text(" ".join(f"+{name}" for name in sorted(missing)))
