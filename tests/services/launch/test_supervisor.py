"""What the supervisor of the local stack does with processes that end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from services.launch.supervisor import FIRST_WAIT_S, LONGEST_WAIT_S, WELL_AFTER_S, Supervisor


class Processes:
    """One named process that dies when it is told to; ``can_start`` false: Redis cannot read its data."""

    def __init__(self) -> None:
        self.codes: dict[str, int | None] = {}
        self.restarts: list[tuple[str, float]] = []
        self.now = 0.0
        self.can_start = True
        self.error: Exception = RuntimeError("its data cannot be read")

    def ended(self) -> dict[str, int | None]:
        return dict(self.codes)

    def restart(self, name: str) -> None:
        if not self.can_start:
            raise self.error
        del self.codes[name]
        self.restarts.append((name, self.now))

    def run(self, supervisor: Supervisor, seconds: float, every: Callable[[], None] = lambda: None) -> None:
        end = self.now + seconds
        while self.now < end:
            every()
            supervisor.look()
            self.now += 0.25


def made() -> tuple[Processes, Supervisor, list[str]]:
    processes, said = Processes(), list[str]()
    return processes, Supervisor(processes, said.append, clock=lambda: processes.now), said


def test_what_runs_is_left_alone() -> None:
    processes, supervisor, said = made()
    processes.run(supervisor, 100)
    assert processes.restarts == said == []


def test_a_process_that_is_killed_runs_again_and_both_are_said() -> None:
    processes, supervisor, said = made()
    processes.codes["trainer"] = -9
    processes.run(supervisor, 5)
    assert processes.restarts == [("trainer", FIRST_WAIT_S)]
    assert said == ["trainer was killed by SIGKILL; restarting it in 1 s", "trainer is running again"]


def test_one_that_keeps_dying_is_started_ever_more_rarely() -> None:
    processes, supervisor, said = made()
    processes.run(supervisor, 400, every=lambda: processes.codes.__setitem__("engine", 1))
    times = [time for _, time in processes.restarts]
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert all(wait >= expected for wait, expected in zip(waits, (2, 4, 8, 16, 30, 30), strict=False))
    assert max(waits) <= LONGEST_WAIT_S + 1
    assert "engine ended with code 1, 3 times in a row; restarting it in 4 s" in said


def test_a_minute_of_health_is_a_new_beginning() -> None:
    processes, supervisor, said = made()
    for _ in range(4):
        processes.codes["api"] = 1
        processes.run(supervisor, 30)
    processes.run(supervisor, WELL_AFTER_S)
    processes.codes["api"] = 1
    processes.run(supervisor, 3)
    assert said[-2] == "api ended with code 1; restarting it in 1 s"


@pytest.mark.parametrize("error", [RuntimeError("its data cannot be read"), OSError("no memory is left")])
def test_a_start_that_fails_is_said_and_tried_again(error: Exception) -> None:
    processes, supervisor, said = made()
    processes.codes["redis"], processes.can_start, processes.error = None, False, error
    processes.run(supervisor, 10)
    assert f"redis cannot be started: {error}" in said
    processes.can_start = True
    processes.run(supervisor, LONGEST_WAIT_S)
    assert said[-1] == "redis is running again"


def test_one_that_dies_does_not_hold_up_another() -> None:
    processes, supervisor, _ = made()
    for _ in range(6):
        processes.codes["engine"] = 1
        processes.run(supervisor, 20)
    processes.codes |= {"engine": 1, "trainer": -9}
    before = processes.now
    processes.run(supervisor, 3)
    assert ("trainer", before + FIRST_WAIT_S) in processes.restarts
