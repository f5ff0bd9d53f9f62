"""The members of an installation that something else starts for us: a batch system, a cluster.

Duty: start them in order, start again what ends, and let them leave in reverse order, each kind within its time. Rule:
what cannot start is told with the end of its log after its third try, long before anybody would wait for it; what ran
once is started again for as long as the crew exists. How a member is started and signalled is its ``CrewPlace``'s
business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import httpx

from services.launch import topology
from services.launch.installation import Installation
from services.launch.placement import Member
from services.launch.supervisor import Supervisor

TRIES = 3
LOOK_S = 0.5
ASK_S = 2.0
# Beside what a process needs: the way of the signal, and of the news of its end.
SLACK_S = 10
NUM_LAST_LINES = 15


class CrewError(RuntimeError):
    """The installation cannot start; the message says why."""


class Running(Protocol):
    """A member that was started."""

    def poll(self) -> int | None:
        """Its exit code once it has ended."""
        ...

    def ask_to_leave(self) -> None:
        """SIGTERM to the process itself. May fail silently: who does not leave is killed."""
        ...

    def kill(self) -> None: ...


class CrewPlace(Protocol):
    def start(self, member: Member, command: Sequence[str], environment: Mapping[str, str]) -> Running:
        """Returns at once. Its output goes to the log of the member."""
        ...


class Crew:
    def __init__(
        self,
        installation: Installation,
        place: CrewPlace,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._installation = installation
        self._place = place
        self._say = say
        self._clock = clock
        self._pause = pause
        self._members = {one.name: one for one in installation.members}
        self._running: dict[str, Running] = {}
        self._starts: dict[str, int] = {}
        self._supervisor = Supervisor(self, say, clock=clock)

    def start(self) -> None:
        for name in self._members:
            self._start(name)

    def _start(self, name: str) -> None:
        member = self._members[name]
        self._starts[name] = self._starts.get(name, 0) + 1
        self._running[name] = self._place.start(
            member, self._installation.command(member), self._installation.environment(member)
        )

    def ended(self) -> dict[str, int | None]:
        return {name: code for name, one in self._running.items() if (code := one.poll()) is not None}

    def restart(self, name: str) -> None:
        self._start(name)

    def look(self) -> None:
        """Start again what has ended, when it is time."""
        self._supervisor.look()

    def until_ready(self) -> None:
        """The API lives and an engine is ready. Raises CrewError if that cannot come."""
        while not (_answers(self._installation.api_url + topology.API_HEALTH.live) and self._has_engine()):
            self.look()
            self._raise_if_hopeless()
            self._pause(LOOK_S)

    def _has_engine(self) -> bool:
        ready = topology.ENGINE_HEALTH.ready
        engines = list(self._installation.engines())
        return not engines or any(_answers(self._installation.engine_url(one) + ready) for one in engines)

    def _raise_if_hopeless(self) -> None:
        """One engine of several may be broken; all of them, or anything else that ends again and again, is the end."""
        failing = [name for name in self.ended() if self._starts[name] >= TRIES]
        engines = {one.name for one in self._installation.engines()}
        if found := [name for name in failing if name not in engines or engines <= {*failing}]:
            name = found[0]
            raise CrewError(
                f"{name} cannot start: it ended {TRIES} times in a row, with code {self.ended()[name]}. "
                f"The end of {self._log(name)}:\n{self.last_words(name)}"
            )

    def last_words(self, name: str) -> str:
        try:
            lines = self._log(name).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(f"    {line}" for line in lines[-NUM_LAST_LINES:]) or "    (nothing was logged)"

    def _log(self, name: str) -> Path:
        return self._installation.data_dir.log_of(name)

    def leave(self) -> None:
        """Kinds leave in reverse order, so each can still reach what it needs; the members of a kind leave together."""
        for process in reversed(topology.processes(self._installation.site)):
            names = [name for name, one in self._members.items() if one.process is process and self._lives(name)]
            if names:
                self._let_leave(names, process.leaving.most_s(self._installation.site) + SLACK_S)

    def _lives(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def _let_leave(self, names: Sequence[str], most_s: float) -> None:
        deadline = self._clock() + most_s  # to ask can take long, too
        for name in names:
            self._running[name].ask_to_leave()
        while (left := [name for name in names if self._lives(name)]) and self._clock() < deadline:
            self._pause(LOOK_S)
        for name in left:
            self._say(f"{name} is killed: it did not leave within {most_s:.0f} s")
            self._running[name].kill()
        for name in names:
            if name not in left:
                self._say(f"{name} left with code {self._running[name].poll()}")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=ASK_S, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
