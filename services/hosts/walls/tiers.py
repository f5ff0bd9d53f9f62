"""Tiers: what stands between untrusted code and the service, from nothing but a process upwards.

Rule: every tier turns a program into the program to be started in its place, and says why this machine does not offer
it. No job gets a weaker tier than the operator's least one and its own; an unavailable tier is refused, never replaced.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Protocol

from services.hosts.walls.plan import Shown, entries
from services.hosts.walls.terms import WallPlan

_ROOT = Path(__file__).resolve().parents[3]
# Isolated: no variable and no folder of an environment decides what is imported before the wall stands.
_ENTER = "import sys; sys.path.append(sys.argv[1]); from services.hosts.walls.enter import main; main()"
_PROBE_S = 30.0
# What a program finds in place of the service's.
_HOME = "/tmp"  # noqa: S108 - inside it is a folder of its own
DISK_MB, NUM_PROCESSES = 512, 1024


class Tier(IntEnum):
    """Stronger ones are greater. From ``CONTAINER`` on, what a policy runs is elsewhere (`services.hosts.sandboxes`),
    and the host stands in ``WALL``."""

    PROCESS = 0
    WALL = 1
    CONTAINER = 2
    REMOTE = 3

    @classmethod
    def named(cls, name: str) -> Tier:
        """Raises ``ValueError``."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(str(one) for one in cls)
            raise ValueError(f"there is no tier {name!r}; known are {known}") from None

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Program:
    """What is to be started."""

    command: Sequence[str]
    variables: Mapping[str, str]
    descriptors: Sequence[int] = ()


@dataclass(frozen=True)
class Bounds:
    """Limits of everything behind one wall together."""

    disk_mb: int = DISK_MB
    """Its temporary files, which are kept in memory."""
    num_processes: int = NUM_PROCESSES
    """Threads are counted as well."""


class Wall(Protocol):
    """One tier."""

    def refusal(self) -> str | None:
        """Why this machine does not offer it."""
        ...

    def around(self, program: Program, shown: Shown, bounds: Bounds, joins: Sequence[str] = ()) -> Program:
        """What to start in place of ``program``. ``joins``: the files of the control groups that it is to be in."""
        ...


class NoWall:
    """``process``: the service's own account, files and network; bounded memory."""

    def refusal(self) -> str | None:
        return None

    def around(self, program: Program, shown: Shown, bounds: Bounds, joins: Sequence[str] = ()) -> Program:
        return program


class NamespaceWall:
    """``wall``: namespaces, Landlock and seccomp of the Linux kernel."""

    def refusal(self) -> str | None:
        return _why_no_namespaces()

    def around(self, program: Program, shown: Shown, bounds: Bounds, joins: Sequence[str] = ()) -> Program:
        plan: WallPlan = {
            "parent": os.getpid(),
            "entries": entries(shown),
            "staging": "/tmp",  # noqa: S108 - it is covered inside only
            "directory": os.getcwd(),
            "network": shown.network,
            "own_bytes": bounds.disk_mb << 20,
            "num_processes": bounds.num_processes,
            "program": list(program.command),
            "variables": {**program.variables, "HOME": _HOME, "USER": "walled"},
            "descriptors": list(program.descriptors),
            "joins": list(joins),
        }
        command = [sys.executable, "-I", "-S", "-c", _ENTER, str(_ROOT), json.dumps(plan)]
        return replace(program, command=command, variables={})


WALLS: Mapping[Tier, Wall] = {Tier.PROCESS: NoWall(), Tier.WALL: NamespaceWall()}


@cache
def _why_no_namespaces() -> str | None:
    if sys.platform != "linux":
        return "it needs Linux"
    probe = Program([sys.executable, "-I", "-S", "-c", "pass"], {})
    built = NamespaceWall().around(probe, Shown(sys.executable), Bounds())
    try:
        done = subprocess.run(built.command, env={}, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"its probe ended with status {done.returncode}"
