"""An end that was not in order is found and explained in the run's own output; of one that was, nothing is said."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from services.process.cancelling import cancel_all
from tests.chaos import departures, judge_remains, lateness
from tests.chaos.absences import Absence, Absences, seconds_away
from tests.chaos.evidence import Evidence
from tests.chaos.lateness import Late
from tests.chaos.processes import End, Nursery, Process

ASKED = 1_700_000_100.0
HEARD = {"event": "signal", "signal": "SIGTERM", "level": "info", "timestamp": "2023-11-14T22:15:00.100000Z"}
LATE = {"event": "cancelled: did not drain", "level": "error", "timestamp": "2023-11-14T22:15:06.000000Z"}


def end(status: int = 1, took_s: float = 6.0, **more: Any) -> End:
    told = {"born": ASKED - 40.0, "asked": ASKED, "at": ASKED + took_s, **more}
    return End("gateway-0", 30217, status, **told)


def run_with(
    work: Path, *ends: End, away: tuple[Absence, ...] = (), faults: tuple[dict[str, Any], ...] = (), log: str = ""
) -> Evidence:
    (work / "logs").mkdir(parents=True)
    (work / "run.json").write_text("{}")
    (work / "faults.jsonl").write_text("".join(f"{json.dumps(fault)}\n" for fault in faults))
    (work / "logs" / "gateway-0-30217.log").write_text(log)
    record = {"ends": [asdict(one) for one in ends], "absences": [asdict(one) for one in away], "left_processes": {}}
    (work / "end.json").write_text(json.dumps(record))
    return Evidence(work)


def test_an_end_that_was_not_in_order_is_explained_by_faults_and_by_its_own_log(tmp_path: Path) -> None:
    log = "".join(f'{{"event": "before {number}", "level": "info"}}\n' for number in range(100))
    failing = {**LATE, "exception": "Traceback\n  here\nBoom: no"}
    log += f"{json.dumps(HEARD)}\n{json.dumps(LATE | {'grace_s': 6.0})}\n{json.dumps(failing)}\n"
    stall = {"at": ASKED + 1.0, "kind": "stall redis", "target": "gateway-0", "detail": "2.5 s"}
    elsewhere = {"at": ASKED + 1.0, "kind": "stop worker", "target": "worker-1", "detail": ""}
    before = {"at": ASKED - 9.0, "kind": "flushall", "target": "redis", "detail": ""}
    away = Absence("gateway-0", ASKED + 1.0, ASKED + 3.5)
    evidence = run_with(tmp_path / "run", end(), away=(away,), faults=(before, stall, elsewhere), log=log)
    assert list(judge_remains.nothing_crashed(evidence)) == ["gateway-0/30217 left with status 1"]
    *words, explained = departures.told(evidence)
    assert explained == (
        "gateway-0/30217 left with status 1: asked 40.0 s after its birth, it took 6.0 s, of which it or Redis was "
        "away for 2.5 s; meanwhile: +1.0 stall redis (2.5 s)"
    )
    assert words[0] == "the log of gateway-0/30217, in seconds from the wish:"
    assert words[-6] == "  +0.10 signal signal=SIGTERM"
    assert words[-5] == "  +6.00 cancelled: did not drain grace_s=6.0"
    assert words[-1] == "  Boom: no"
    assert len(words) == 1 + departures.MAX_LINES


def test_what_is_told_is_bounded(tmp_path: Path) -> None:
    ends = [end(3, asked=None) for _ in range(9)]
    faults = tuple({"at": ASKED, "kind": "flushall", "target": "redis"} for _ in range(99))
    evidence = run_with(tmp_path / "run", *ends, faults=faults, log="x" * 10_000 + "\n" + "y\n" * 100_000)
    told = list(departures.told(evidence))
    assert len(told) == departures.MAX_TOLD * (2 + departures.MAX_LINES)
    assert max(map(len, told)) < 2 * departures.MAX_LINE_CHARS
    assert "ended by itself with status 3: it had lived for 46.0 s; before: -6.0 flushall, " in told[-1]


@pytest.mark.parametrize(
    ("one", "is_well"),
    [
        (end(0), True),
        (end(-9), True),
        (end(1), False),
        (end(70), False),
        (end(2, asked=None), False),
        (end(0, asked=None), False),
        (end(-9, is_late=True), False),
        (end(-15), True),
    ],
)
def test_who_is_asked_leaves_with_status_0_or_is_killed_by_a_fault(one: End, is_well: bool, tmp_path: Path) -> None:
    evidence = run_with(tmp_path / "run", one)
    assert (list(judge_remains.nothing_crashed(evidence)) == []) == is_well
    assert (list(departures.told(evidence)) == []) == is_well


def test_who_hears_signals_does_not_die_of_one(tmp_path: Path) -> None:
    assert departures.wrong(run_with(tmp_path / "run", end(-15), log=json.dumps(HEARD)))


@pytest.mark.parametrize(
    ("away", "is_well"),
    [
        ([], False),
        ([("redis", 0.0, 3.5)], True),
        ([("gateway-0", -5.0, 2.0), ("redis", 1.0, 3.5)], True),
        ([("redis", 0.0, 2.0), ("redis", 1.0, 2.5)], False),  # together two and a half
        ([("worker-1", 0.0, 6.0)], False),
        ([("redis", -9.0, 0.0), ("redis", 6.0, 9.0)], False),
    ],
)
def test_who_was_kept_from_it_for_half_of_the_time_need_not_leave_in_order(
    away: list[tuple[str, float, float]], is_well: bool, tmp_path: Path
) -> None:
    absences = tuple(Absence(who, ASKED + begin, ASKED + until) for who, begin, until in away)
    assert bool(departures.wrong(run_with(tmp_path / "a", end(1), away=absences))) != is_well
    assert departures.wrong(run_with(tmp_path / "b", end(70), away=absences)) == [end(70)]


def test_time_away_is_counted_once() -> None:
    absences = [Absence("redis", 4.0, 6.0), Absence("a", 0.0, 10.0), Absence("redis", 1.0, 3.0), Absence("b", 2.0, 5.0)]
    assert seconds_away(absences, ("redis",), 0.0, 100.0) == 4.0
    assert seconds_away(absences, ("redis", "b"), 2.0, 5.5) == 3.5
    assert seconds_away(absences, ("a",), 3.0, 4.0) == 1.0
    assert seconds_away(absences, (), 0.0, 100.0) == 0.0


def test_warnings_of_all_who_were_there_are_told_where_nobody_is_to_blame(tmp_path: Path) -> None:
    run_with(tmp_path / "run", log=f"{json.dumps(HEARD)}\n{json.dumps(LATE)}\nplain text\n")
    told = list(departures.warnings(tmp_path / "run"))
    assert told == ["gateway-0: 22:15:06 cancelled: did not drain ", "gateway-0: plain text"]


async def test_a_nursery_notes_how_its_children_end(tmp_path: Path) -> None:
    absences = Absences()
    nursery = Nursery(tmp_path / "logs", {}, absences)
    # It looks again and again: a signal that comes just before `signal.pause` would not end that.
    ends = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(1)\n"
        "while True: time.sleep(0.01)"
    )
    try:
        await nursery.open()
        crash = await nursery.start("a", "agents", [sys.executable, "-c", "print('oh'); raise SystemExit(3)"], {})
        crash.is_wanted = False
        await crash.ended.wait()
        leaver = await nursery.start("b", "agents", [sys.executable, "-uc", ends], {})
        pid, log = leaver.pid, tmp_path / "logs" / f"b-{leaver.pid}.log"
        while not (log.exists() and log.read_text()):
            assert not leaver.ended.is_set()
            await asyncio.sleep(0.01)
        nursery.stop(leaver)
        nursery.go_on(leaver, pid)
        await nursery.leave(leaver, 60.0)
    finally:
        await nursery.close()
    first, second = nursery.ends
    assert (first.name, first.status, first.asked) == ("a", 3, None)
    assert (second.name, second.pid, second.status, second.is_late) == ("b", pid, 7, False)
    assert second.asked is not None
    assert second.born < second.asked <= second.at
    assert nursery.num_crashes == 1
    assert departures.last_words(tmp_path, first) == ["oh"]
    (absence,) = absences.noted
    assert (absence.who, second.born < absence.begin <= absence.end <= second.asked) == ("b", True)


async def test_who_is_leaving_is_not_asked_again(tmp_path: Path) -> None:
    """A second signal hurries a process of the service, which then has a reason to leave otherwise."""
    nursery = Nursery(tmp_path / "logs", {}, Absences())
    counts = (
        "import signal, sys, time; told = []; signal.signal(signal.SIGTERM, lambda *_: told.append(print(1))); "
        "signal.signal(signal.SIGCONT, lambda *_: sys.exit(len(told))); print(1)\nwhile True: time.sleep(0.01)"
    )
    try:
        await nursery.open()
        leaver = await nursery.start("a", "agents", [sys.executable, "-uc", counts], {})
        pid, log = leaver.pid, tmp_path / "logs" / f"a-{leaver.pid}.log"
        leaver.is_wanted, asking = False, []
        for num_lines in (1, 2):
            while not log.exists() or len(log.read_text().split()) < num_lines:
                await asyncio.sleep(0.01)
            asking.append(asyncio.create_task(nursery.restart(leaver, 60.0)))
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGCONT)
        await leaver.ended.wait()
        await cancel_all(asking, again_after_s=1.0)
    finally:
        await nursery.close()
    assert [end.status for end in nursery.ends] == [1]


async def test_a_process_that_dies_in_the_moment_of_its_birth_is_known_to_have_died(tmp_path: Path) -> None:
    """Both may stand in what is read at once; whoever started it has not run in between."""
    nursery = Nursery(tmp_path, {}, Absences())
    process = Process("trainer-0", "trainer", [], {}, is_wanted=False)
    born = asyncio.get_running_loop().create_future()
    nursery._births["trainer-0-1"] = process, born
    nursery._hear({"born": "trainer-0-1", "pid": 4711})
    nursery._hear({"died": 4711, "status": 1})
    assert born.done()
    assert process.ended.is_set()
    assert process.pid == 0
    assert [(end.pid, end.status) for end in nursery.ends] == [(4711, 1)]


def test_what_came_late_is_told_apart_from_what_is_wrong() -> None:
    assert departures.may_be_late(end())
    assert departures.may_be_late(end(-signal.SIGKILL, is_late=True))
    assert not departures.may_be_late(end(-signal.SIGSEGV))
    assert not departures.may_be_late(replace(end(), asked=None))
    assert lateness.status([]) == 0
    assert lateness.status([Late("it left late")]) == lateness.LATE
    assert lateness.status([Late("it left late"), "trained twice"]) == 1
